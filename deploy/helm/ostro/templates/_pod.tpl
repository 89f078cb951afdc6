{{- /* The pod of a Deployment or a StatefulSet, which differ in where the cache lies. */ -}}
{{- define "ostro.pod" -}}
{{- $settings := include "ostro.settings" . | fromJson -}}
metadata:
  labels:
    {{- include "ostro.selector" . | nindent 4 }}
  annotations:
    # Pods read their settings when they start.
    checksum/settings: {{ include "ostro.settings" . | sha256sum }}
    {{- if not (or .Values.apiKey.secret .Values.serviceMonitor.enabled) }}
    prometheus.io/scrape: "true"
    prometheus.io/port: "8000"
    prometheus.io/path: /metrics
    {{- end }}
spec:
  serviceAccountName: {{ include "ostro.name" . }}
  automountServiceAccountToken: false
  # A service called ostro would come as OSTRO_PORT=tcp://…, which is a setting's name.
  enableServiceLinks: false
  # The pause below, then the drain, then what engines take to end.
  terminationGracePeriodSeconds: {{ add 20 (ceil $settings.drain_timeout) }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "ostro.selector" . | nindent 10 }}
  {{- with include "ostro.placement" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: ostro
      image: {{ include "ostro.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      ports:
        - name: http
          containerPort: 8000
      env:
        - name: PORT
          value: "8000"
        {{- with include "ostro.secrets" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      envFrom:
        - configMapRef:
            name: {{ include "ostro.name" . }}
      # The server is up within seconds and answers while its model loads: only readiness waits for that.
      startupProbe:
        httpGet:
          path: /healthz
          port: http
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet:
          path: /healthz
          port: http
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet:
          path: /readyz
          port: http
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      lifecycle:
        # A pod that ends gets requests until all have heard of it; once it drains it refuses new ones. So it goes on as
        # before for a moment, and SIGTERM comes after that.
        preStop:
          sleep:
            seconds: 10
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      resources:
        {{- include "ostro.resources" . | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /cache
        - name: tmp
          mountPath: /tmp
        {{- if .Values.sharedPages.claim }}
        - name: shared
          mountPath: /shared
        {{- end }}
        {{- if gt (int .Values.gpus) 1 }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
  volumes:
    {{- if eq .Values.kind "Deployment" }}
    - name: cache
      emptyDir:
        sizeLimit: {{ .Values.cache.size | quote }}
    {{- end }}
    - name: tmp
      emptyDir:
        sizeLimit: 1Gi
    {{- with .Values.sharedPages.claim }}
    - name: shared
      persistentVolumeClaim:
        claimName: {{ . | quote }}
    {{- end }}
    {{- if gt (int .Values.gpus) 1 }}
    # For NCCL: the default 64 MiB is too small. It counts towards the memory limit.
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: 4Gi
    {{- end }}
{{- end -}}
