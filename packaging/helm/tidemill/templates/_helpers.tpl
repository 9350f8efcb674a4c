{{- define "tidemill.labels" -}}
app.kubernetes.io/name: tidemill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The name of a Service begins with a letter; a StatefulSet's has at most 52 characters, its pods' labels 63. */}}
{{- define "tidemill.check" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]{0,42}$" .Release.Name) }}
{{- fail (printf "The release is named %s: use a-z, 0-9 and -, starting with a letter, at most 43 characters." .Release.Name) }}
{{- end }}
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
  {{- range .Values.volumeMounts }}
  - {{ toJson . }}
  {{- end }}
{{- end }}
