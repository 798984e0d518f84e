{{- define "pollux.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pollux.labels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: pollux
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* The namespaces of jobs, comma separated: the release's own unless others are named. */}}
{{- define "pollux.namespaces" -}}
{{- join "," (default (list .Release.Namespace) .Values.namespaces | uniq) -}}
{{- end -}}

{{/* The deployment's name: one given, else one that no other release on the cluster has, 40 characters at most. */}}
{{- define "pollux.deployment" -}}
{{- if .Values.deployment -}}
{{- .Values.deployment -}}
{{- else -}}
{{- $own := ternary .Release.Name (printf "%s-%s" .Release.Namespace .Release.Name) (eq .Release.Name .Release.Namespace) | replace "." "-" -}}
{{- if le (len $own) 40 -}}
{{- $own -}}
{{- else -}}
{{- printf "%s-%s" ($own | trunc 31 | trimSuffix "-") ($own | sha256sum | trunc 8) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The variables that settings.yaml sets from other values. */}}
{{- define "pollux.ownSettings" -}}
{{- print "POLLUX_CLUSTER POLLUX_STATE POLLUX_DEPLOYMENT POLLUX_INTERVAL_S POLLUX_POLICY POLLUX_FAIRNESS_P POLLUX_SHADOW" -}}
{{- print " POLLUX_KEEP_DECISIONS POLLUX_KUBE_NAMESPACE POLLUX_KUBE_NAMESPACES POLLUX_KUBE_LEASE_NAMESPACE" -}}
{{- print " POLLUX_KUBE_GPU_RESOURCES POLLUX_KUBE_GPU_TYPE_LABEL POLLUX_KUBE_DRIVER_SERVICE_ACCOUNT" -}}
{{- print " POLLUX_KUBE_POD_TEMPLATE POLLUX_KUBE_DRIVER_IMAGE POLLUX_KUBE_TOLERATIONS POLLUX_KUBE_JOBS_VOLUME" -}}
{{- print " MLFLOW_TRACKING_URI POLLUX_MLFLOW_URL POLLUX_AIRFLOW_URL POLLUX_AIRFLOW_LOGIN POLLUX_METRICS_TOKEN" -}}
{{- end -}}

{{- define "pollux.leaseNamespace" -}}
{{- default .Release.Namespace .Values.leaseNamespace -}}
{{- end -}}

{{- define "pollux.schedulerAccount" -}}
{{- default (printf "%s-scheduler" (include "pollux.fullname" .)) .Values.scheduler.serviceAccount.name -}}
{{- end -}}

{{- define "pollux.driverAccount" -}}
{{- default (printf "%s-driver" (include "pollux.fullname" .)) .Values.driver.serviceAccount.name -}}
{{- end -}}

{{- define "pollux.workerAccount" -}}
{{- default (printf "%s-worker" (include "pollux.fullname" .)) .Values.worker.serviceAccount.name -}}
{{- end -}}

{{- define "pollux.checkpointClaim" -}}
{{- if .Values.checkpoints.pvc.existingClaim -}}
{{- .Values.checkpoints.pvc.existingClaim -}}
{{- else if .Values.checkpoints.pvc.create -}}
{{- printf "%s-checkpoints" (include "pollux.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "pollux.stateClaim" -}}
{{- if .Values.state.pvc.existingClaim -}}
{{- .Values.state.pvc.existingClaim -}}
{{- else if .Values.state.pvc.create -}}
{{- printf "%s-state" (include "pollux.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* Airflow's own accounts, as subjects of a binding. */}}
{{- define "pollux.airflowSubjects" -}}
{{- range .Values.airflow.serviceAccounts }}
- kind: ServiceAccount
  name: {{ .name | quote }}
  namespace: {{ default $.Release.Namespace .namespace | quote }}
{{- end }}
{{- end -}}

{{/* Whoever may see nodes and pods: those, and Airflow's API server. */}}
{{- define "pollux.readerSubjects" -}}
{{- include "pollux.schedulerSubjects" . }}
{{- range .Values.airflow.readers }}
- kind: ServiceAccount
  name: {{ .name | quote }}
  namespace: {{ default $.Release.Namespace .namespace | quote }}
{{- end }}
{{- end -}}

{{/* Whoever may run the scheduling task: Airflow's accounts and the scheduler's own. */}}
{{- define "pollux.schedulerSubjects" -}}
{{- include "pollux.airflowSubjects" . }}
{{- if or .Values.scheduler.serviceAccount.create .Values.scheduler.serviceAccount.name }}
- kind: ServiceAccount
  name: {{ include "pollux.schedulerAccount" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- end }}
{{- end -}}

{{/* Jobs that run stay whole when the release goes: what they need is not removed with it. */}}
{{- define "pollux.keep" -}}
helm.sh/resource-policy: keep
{{- end -}}

{{/* The volume source of all jobs' folders, as JSON; empty without one. */}}
{{- define "pollux.jobsVolume" -}}
{{- if .Values.checkpoints.volume -}}
{{- .Values.checkpoints.volume | toJson -}}
{{- else if include "pollux.checkpointClaim" . -}}
{{- dict "persistentVolumeClaim" (dict "claimName" (include "pollux.checkpointClaim" .)) | toJson -}}
{{- end -}}
{{- end -}}

{{/* A claim. Call with a dict of root, claim (its values), name and namespace. */}}
{{- define "pollux.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .name | quote }}
  namespace: {{ .namespace | quote }}
  labels:
    {{- include "pollux.labels" .root | nindent 4 }}
  annotations:
    {{- include "pollux.keep" .root | nindent 4 }}
    {{- with .claim.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  accessModes:
    {{- toYaml .claim.accessModes | nindent 4 }}
  {{- with .claim.storageClassName }}
  storageClassName: {{ if eq . "-" }}""{{ else }}{{ . | quote }}{{ end }}
  {{- end }}
  resources:
    requests:
      storage: {{ .claim.size | quote }}
{{- end -}}
