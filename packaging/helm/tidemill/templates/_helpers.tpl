{{- define "tidemill.labels" -}}
app.kubernetes.io/name: tidemill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tidemill.secret" -}}
{{ .Values.existingSecret | default (printf "%s-tidemill" .Release.Name) }}
{{- end }}

{{- define "tidemill.pod" -}}
serviceAccountName: {{ .Release.Name }}-tidemill
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tidemill.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
envFrom:
  - secretRef: {name: {{ include "tidemill.secret" . }}}
volumeMounts:
  - {name: config, mountPath: /etc/tidemill, readOnly: true}
  - {name: data, mountPath: /var/lib/tidemill}
  - {name: tmp, mountPath: /tmp}
{{- end }}
