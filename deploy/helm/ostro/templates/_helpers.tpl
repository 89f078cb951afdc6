{{- define "ostro.name" -}}
{{- if contains "ostro" .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-ostro
{{- end -}}
{{- end -}}

{{- define "ostro.selector" -}}
app.kubernetes.io/name: ostro
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "ostro.labels" -}}
{{ include "ostro.selector" . }}
app.kubernetes.io/part-of: ostro
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "ostro.image" -}}
{{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
{{- end -}}

{{- /* The server's settings as JSON: those of this deployment, and over them the user's. */ -}}
{{- define "ostro.settings" -}}
{{- $settings := dict -}}
{{- $name := include "ostro.name" . -}}
{{- $hosts := printf "%s-serve-svc,*.svc,*.svc.cluster.local" $name -}}
{{- if ne .Values.kind "RayService" -}}
  {{- $in := printf "%s.%s" $name .Release.Namespace -}}
  {{- $hosts = printf "%s,%s,%s.svc,%s.svc.cluster.local" $name $in $in $in -}}
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
{{- if .Values.sharedPages.claim -}}
  {{- $_ := set $settings "kv_shared" "/shared" -}}
{{- end -}}
{{- range $key, $value := .Values.settings -}}
  {{- $_ := set $settings $key $value -}}
{{- end -}}
{{- with .Values.settings.allowed_hosts -}}
  {{- $hosts = printf "%s,%s" $hosts . -}}
{{- end -}}
{{- $_ := set $settings "allowed_hosts" $hosts -}}
{{ toJson $settings }}
{{- end -}}

{{- define "ostro.secrets" -}}
{{- range $value, $variable := dict "apiKey" "OSTRO_API_KEY" "hfToken" "HF_TOKEN" "prefillKey" "OSTRO_PREFILL_KEY" }}
{{- with index $.Values $value }}
{{- if .secret }}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret | quote }}
      key: {{ .key | quote }}
{{- end }}
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
{{ .Values.autoscaling.maxReplicas | default 8 }}
{{- end -}}

{{- /* The number that a quantity of Kubernetes stands for: 500m, 4, 20Gi. */ -}}
{{- define "ostro.quantity" -}}
{{- $text := kindIs "string" . | ternary . (toJson .) -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $units = merge $units (dict "Ki" 0x1p10 "Mi" 0x1p20 "Gi" 0x1p30 "Ti" 0x1p40 "Pi" 0x1p50 "Ei" 0x1p60) -}}
{{ mulf $number (get $units (trimPrefix $number $text)) }}
{{- end -}}

{{- /* The bytes of a size as the server reads it, where 1G is 1GiB. */ -}}
{{- define "ostro.size" -}}
{{- $text := kindIs "string" . | ternary . (toJson .) -}}
{{- $unit := regexFind "[KMGkmg]" $text | upper -}}
{{ include "ostro.quantity" (printf "%s%s" (regexFind "^[0-9.]+" $text) (empty $unit | ternary "" (printf "%si" $unit))) }}
{{- end -}}

{{- /* The port of an http(s):// address. */ -}}
{{- define "ostro.port" -}}
{{- $url := urlParse . -}}
{{ regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (eq $url.scheme "https" | ternary "443" "80") }}
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
