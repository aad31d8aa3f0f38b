{{/* What several templates share. */}}

{{- define "corolla.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "corolla.name" -}}
{{ .Release.Name | trunc 20 | trimSuffix "-" }}
{{- end }}

{{- define "corolla.labels" -}}
app.kubernetes.io/name: corolla
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "corolla.pod" -}}
automountServiceAccountToken: false
terminationGracePeriodSeconds: 60
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  # allows the calls of Landlock, which `confine` in site.toml needs
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "corolla.container" -}}
image: {{ include "corolla.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A private key may be its owner's alone (mode 600), but a secret's files belong to root and the pod's group. */}}
{{- define "corolla.copy-keys" -}}
- name: copy-keys
  {{- include "corolla.container" . | nindent 2 }}
  command: [sh, -c, "install -m 600 /secret/* /keys/"]
  volumeMounts:
    - {name: secret, mountPath: /secret, readOnly: true}
    - {name: keys, mountPath: /keys}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 64Mi}
{{- end }}

{{/* Its port is on the pod's loopback, so that kubelet cannot ask it by itself: a command of the image does. */}}
{{- define "corolla.probes" -}}
startupProbe:
  exec: {command: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
livenessProbe:
  exec: {command: {{ . }}}
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 4
readinessProbe:
  exec: {command: {{ . }}}
  periodSeconds: 15
  timeoutSeconds: 10
{{- end }}
