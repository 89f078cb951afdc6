{{- define "ostro.name" -}}
{{- if contains "ostro" .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-ostro
{{- end -}}
{{- end -}}

{{- define "ostro.selector" -}}
app.kubernetes.io/name: ostro
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ostro.labels" -}}
{{ include "ostro.selector" . }}
app.kubernetes.io/part-of: ostro
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "ostro.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}

{{- /* The server's settings as JSON: those of this deployment, and over them the user's. */ -}}
{{- define "ostro.settings" -}}
{{- $settings := dict -}}
{{- $name := include "ostro.name" . -}}
{{- if eq .Values.kind "RayService" -}}
  {{- $_ := set $settings "allowed_hosts" (printf "%s-serve-svc,*.svc,*.svc.cluster.local" $name) -}}
{{- else -}}
  {{- $in := printf "%s.%s" $name .Release.Namespace -}}
  {{- $_ := set $settings "allowed_hosts" (printf "%s,%s,%s.svc,%s.svc.cluster.local" $name $in $in $in) -}}
  {{- $_ := set $settings "drain_timeout" 40 -}}
  {{- $_ := set $settings "log_format" "json" -}}
{{- end -}}
{{- if .Values.gpus -}}
  {{- /* Without its GPU a pod fails, instead of serving slowly on a CPU. */ -}}
  {{- $_ := set $settings "device" "cuda" -}}
{{- end -}}
{{- if gt (int .Values.gpus) 1 -}}
  {{- $_ := set $settings "tensor_parallel" "auto" -}}
{{- end -}}
{{- range $key, $value := .Values.settings -}}
  {{- $_ := set $settings $key $value -}}
{{- end -}}
{{ toJson $settings }}
{{- end -}}

{{- define "ostro.secrets" -}}
{{- with .Values.apiKey }}
{{- if .secret }}
- name: OSTRO_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- with .Values.hfToken }}
{{- if .secret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "ostro.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if .Values.gpus -}}
  {{- $_ := set $resources.limits "nvidia.com/gpu" (.Values.gpus | toString) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{- define "ostro.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .Values.gpus .Values.tolerations }}
tolerations:
  {{- if .Values.gpus }}
  - key: nvidia.com/gpu
    operator: Exists
    effect: NoSchedule
  {{- end }}
  {{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "ostro.minReplicas" -}}
{{ .Values.autoscaling.minReplicas | default 2 }}
{{- end -}}

{{- define "ostro.maxReplicas" -}}
{{- $most := .Values.autoscaling.maxReplicas | default 8 -}}
{{- if lt (int $most) (include "ostro.minReplicas" . | int) -}}
  {{- fail (printf "autoscaling.maxReplicas is %v, and must not be lower than minReplicas" $most) -}}
{{- end -}}
{{ $most }}
{{- end -}}

{{- define "ostro.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - type: Pods
      value: 2
      periodSeconds: 60
scaleDown:
  # A new pod loads its model first: those that are there are kept for a while.
  stabilizationWindowSeconds: 600
  policies:
    - type: Pods
      value: 1
      periodSeconds: 120
{{- end -}}
