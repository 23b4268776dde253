{{/* The common name: release and chart, or the name in the values. */}}
{{- define "tms.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tms.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" }}
{{- else if contains (include "tms.name" .) .Release.Name }}
{{- .Release.Name | trunc 45 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "tms.name" .) | trunc 45 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The name of an object; in another namespace, the release's namespace is its prefix. Takes a dict: root, namespace. */}}
{{- define "tms.nameIn" -}}
{{- $release := .root.Release.Namespace }}
{{- if ne (.namespace | default $release) $release }}{{ $release }}.{{ end }}{{ include "tms.fullname" .root }}
{{- end }}

{{- define "tms.selector" -}}
app.kubernetes.io/name: {{ include "tms.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Labels without duplicates: the chart's labels override the object's, which override commonLabels. Takes a dict: root; component, labels. */}}
{{- define "tms.labels" -}}
{{- $root := .root }}
{{- $own := include "tms.selector" $root | fromYaml }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") }}
{{- $_ := set $own "app.kubernetes.io/version" ($root.Values.image.tag | default $root.Chart.AppVersion | trunc 63 | trimAll "-_.") }}
{{- $_ := set $own "app.kubernetes.io/managed-by" $root.Release.Service }}
{{- with .component }}
{{- $_ := set $own "app.kubernetes.io/component" . }}
{{- end }}
{{- merge $own (.labels | default dict) ($root.Values.commonLabels | default dict) | toYaml }}
{{- end }}

{{/* The image. An archive needs the image with Parquet, whose tag ends with -archive. */}}
{{- define "tms.image" -}}
{{- $name := .Values.image.repository }}
{{- with .Values.global.imageRegistry | default .Values.image.registry }}{{ $name = printf "%s/%s" . $name }}{{ end }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" $name .Values.image.digest }}
{{- else }}
{{- printf "%s:%s%s" $name (.Values.image.tag | default .Chart.AppVersion) (ternary "-archive" "" (dig "archive" "enabled" false .Values.janitor)) }}
{{- end }}
{{- end }}

{{/* The image for Spark; the registry of all charts, if set, replaces its registry. */}}
{{- define "tms.sparkImage" -}}
{{- $name := .Values.spark.image }}
{{- with .Values.global.imageRegistry }}{{ $name = printf "%s/%s" . (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $name "") }}{{ end }}
{{- $name }}
{{- end }}

{{- define "tms.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "tms.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The templates below return "yes" or nothing. "tms.embedded": whether server, store and janitor run in one pod. */}}
{{- define "tms.embedded" -}}
{{- if eq .Values.storage.kind "leveldb" }}yes{{ end }}
{{- end }}

{{- define "tms.hasManager" -}}
{{- if and .Values.server.enabled (eq .Values.transactions.source "manager") (not (include "tms.embedded" .)) }}yes{{ end }}
{{- end }}

{{/* Whether several servers run, or may run because the topics have several slots. */}}
{{- define "tms.several" -}}
{{- if or (gt (int .Values.serverReplicas) 1) (gt (int (dig "leader" "slots" 1 (.Values.server | default dict))) 1) }}yes{{ end }}
{{- end }}

{{/* Whether the transaction log is in the volume; several servers have it in HBase. */}}
{{- define "tms.managesInVolume" -}}
{{- if and (include "tms.hasManager" .) (not (include "tms.several" .)) }}yes{{ end }}
{{- end }}

{{- define "tms.sparkOnKubernetes" -}}
{{- if and .Values.spark.enabled (hasPrefix "k8s://" .Values.spark.master) }}yes{{ end }}
{{- end }}

{{/* Whether Spark's executors run outside the driver and connect to it. With "tms.sparkOnKubernetes", they are pods of this release. */}}
{{- define "tms.sparkIsCalled" -}}
{{- if and .Values.spark.enabled (regexMatch "^(k8s|spark)://" .Values.spark.master) }}yes{{ end }}
{{- end }}

{{/* Whether Spark's executors mount the volume, for the archive. */}}
{{- define "tms.sparkKeepsFiles" -}}
{{- if and (include "tms.keepsFiles" .) (has "sweep" .Values.spark.command) }}yes{{ end }}
{{- end }}

{{/* Whether the server is scraped. */}}
{{- define "tms.scrapesServer" -}}
{{- with .Values.serviceMonitor }}
{{- if and .enabled $.Values.server.enabled .serverAuthorization (not (include "tms.embedded" $)) }}yes{{ end }}
{{- end }}
{{- end }}

{{/* Whether pods that delete rows mount the volume. On HBase, only an archive needs files. */}}
{{- define "tms.keepsFiles" -}}
{{- if or (include "tms.embedded" .) (dig "archive" "enabled" false .Values.janitor) }}yes{{ end }}
{{- end }}

{{/* The grace period of a pod in seconds: at least two timeouts of HBase and a minute. */}}
{{- define "tms.graceSeconds" -}}
{{- max 120 (int64 .Values.terminationGracePeriodSeconds) (add 60 (mul 2 (dig "hbase" "timeout_seconds" 30 .Values.storage | int64))) }}
{{- end }}

{{/* The component that serves the metrics: the daemon, or the exporter with CronJobs. */}}
{{- define "tms.component" -}}
{{- if eq .Values.mode "cronjob" }}exporter{{ else }}janitor{{ end }}
{{- end }}

{{/* Whether a pod mounts files at /etc/tms-secrets: existingSecret, or a volume of the values. */}}
{{- define "tms.mountsSecrets" -}}
{{- if .Values.existingSecret }}yes{{ end }}
{{- range .Values.extraVolumeMounts }}{{ if hasPrefix "/etc/tms-secrets" (toString .mountPath) }}yes{{ end }}{{ end }}
{{- end }}

{{/* The settings with a file in /etc/tms-secrets, one "NAME is PATH" a line. Takes a dict: name, value. */}}
{{- define "tms.secretFiles" -}}
{{- if kindIs "map" .value }}
{{- range $key, $value := .value }}{{ include "tms.secretFiles" (dict "name" (printf "%s.%s" $.name $key) "value" $value) }}{{ end }}
{{- else if hasPrefix "/etc/tms-secrets/" (toString .value) }}
{{- printf "%s is %s\n" .name .value }}
{{- end }}
{{- end }}

{{/* The settings file as JSON, which is valid YAML, because toYaml may write large integers with an exponent. */}}
{{- define "tms.config" -}}
{{- $settings := dict "storage" .Values.storage "transactions" .Values.transactions "janitor" .Values.janitor }}
{{- if eq .Values.mode "cronjob" }}
{{- $by := printf "CronJob %s (%s)" .Values.cronjob.schedule .Values.cronjob.timeZone }}
{{- $_ := set $settings "janitor" (merge (dict) .Values.janitor (dict "started_by" $by)) }}
{{- end }}
{{- if .Values.server.enabled }}
{{- $_ := set $settings "server" (omit .Values.server "enabled") }}
{{- end }}
{{- if not (include "tms.mountsSecrets" .) }}
{{- range $name, $value := $settings }}
{{- with include "tms.secretFiles" (dict "name" $name "value" $value) }}
{{- fail (printf "%s, and existingSecret is empty, so no pod has this file. Set existingSecret to the Secret with the file." (first (splitList "\n" .))) }}
{{- end }}
{{- end }}
{{- end }}
{{- toPrettyJson $settings }}
{{- end }}

{{/* The port of this chart's transaction service; empty without a service, or if only its own pod uses it. */}}
{{- define "tms.transactionsPort" -}}
{{- $listens := .Values.transactions.thrift | default "127." }}
{{- if include "tms.hasManager" . }}15165
{{- else if and (include "tms.embedded" .) (eq .Values.transactions.source "manager") (not (regexMatch "^(127[.]|localhost:|\\[::1\\]:)" $listens)) }}
{{- last (splitList ":" $listens) }}
{{- end }}
{{- end }}

{{/* The HOST:PORT of this chart's transaction service. */}}
{{- define "tms.transactionsAddress" -}}
{{- printf "%s-transactions:15165" (include "tms.fullname" .) }}
{{- end }}

{{/* The name of the store in the janitor's messages. The janitor refuses decisions about another store. */}}
{{- define "tms.storeName" -}}
{{- if include "tms.embedded" . }}{{ clean .Values.storage.leveldb.path }}
{{- else }}{{ printf "HBase namespace %s at %s" (.Values.storage.hbase.namespace | default "cdap_system") (join ", " .Values.storage.hbase.thrift) }}
{{- end }}
{{- end }}

{{/* The metadata of every object. Takes a dict: root; name, suffix, namespace, component, labels, annotations. */}}
{{- define "tms.metadata" -}}
name: {{ .name | default (include "tms.nameIn" .) }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "tms.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The policy for failed pods of a Job. In Kubernetes 1.26 each rule needs conditions, and each condition a status. Takes a
dict: container; codes, the exit codes for which a retry cannot help.
*/}}
{{- define "tms.failurePolicy" -}}
podFailurePolicy:
  rules:
    - action: FailJob
      onExitCodes: {containerName: {{ .container }}, operator: In, values: {{ toJson .codes }}}
      onPodConditions: []
    # A pod that Kubernetes evicted does not count as a failed run.
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
{{- end }}

{{/* Environment variables without duplicates: extraEnv overrides the chart's. Takes a dict: root, env. */}}
{{- define "tms.env" -}}
{{- $extra := .root.Values.extraEnv | default list }}
{{- $names := list }}{{ $capitals := list }}
{{- range $extra }}{{ $names = append $names .name }}{{ $capitals = append $capitals (upper .name) }}{{ end }}
{{- $env := list }}
{{- /* This variable prevents extraEnv and extraEnvFrom from enabling deletions. */}}
{{- $apply := dict "name" "TMS_JANITOR__APPLY" "value" (toString .root.Values.janitor.apply) }}
{{- $given := append (.env | default list) $apply }}
{{- if .root.Values.krb5Conf }}{{ $given = append $given (dict "name" "KRB5_CONFIG" "value" "/etc/tms/krb5.conf") }}{{ end }}
{{- range $given }}
{{- if and (hasPrefix "TMS_" .name) (has .name $capitals) }}
{{- fail (printf "extraEnv: the chart sets %s in the pods of this release. Remove it from extraEnv." .name) }}
{{- else if not (has .name $names) }}
{{- $env = append $env . }}
{{- end }}
{{- end }}
{{- concat $env $extra | toJson }}
{{- end }}

{{/*
Memory and processors of a pod. Takes a dict: root, component, and given, the resources in the values. The default memory
limit follows from the settings: the memory of requests, the cache, and the server itself.
*/}}
{{- define "tms.resources" -}}
{{- $serves := or (eq .component "server") (and (eq .component "janitor") (include "tms.embedded" .root)) }}
{{- $made := deepCopy .given }}
{{- if and (hasKey $made "limits") (not (hasKey $made.limits "memory")) }}
{{- $megabytes := 512 }}
{{- if $serves }}
{{- with .root.Values.server }}
{{- $megabytes = add (int64 (dig "memory" 256 .)) (int64 (dig "cache_mb" 30 .)) 226 (ternary 0 128 (eq $.component "server")) }}
{{- end }}
{{- end }}
{{- $_ := set $made "limits" (merge (dict "memory" (printf "%dMi" $megabytes)) $made.limits) }}
{{- end }}
{{- toYaml $made }}
{{- end }}

{{/*
A pod. Takes a dict: root; component; args; optional: command, image, ports, probes, env, resources,
restartPolicy, data (mount the volume for data), token (mount the service account's token), serviceAccountName, near,
config (another ConfigMap with the settings), graceSeconds. Values under components override the others.
*/}}
{{- define "tms.pod" -}}
{{- $root := .root }}
{{- $own := get ($root.Values.components | default dict) .component | default dict }}
{{- $values := omit $root.Values "components" }}
{{- range $name, $value := $own }}{{ $_ := set $values $name $value }}{{ end }}
{{- with $values }}
metadata:
  labels:
    {{- include "tms.labels" (dict "root" $root "component" $.component "labels" .podLabels) | nindent 4 }}
  annotations:
    checksum/config: {{ include "tms.config" $root | sha256sum }}
    {{- with merge (dict) (.podAnnotations | default dict) (.commonAnnotations | default dict) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ $.serviceAccountName | default (include "tms.serviceAccountName" $root) }}
  automountServiceAccountToken: {{ $.token | default false }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $.graceSeconds | default (include "tms.graceSeconds" $root) }}
  {{- with $.restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  securityContext:
    {{- toYaml (.podSecurityContext | default dict) | nindent 4 }}
  {{- with concat (.imagePullSecrets | default list) (.global.imagePullSecrets | default list) | uniq }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $.near }}
  affinity:
    podAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "tms.selector" $root | nindent 14 }}
              app.kubernetes.io/component: {{ $.near }}
  {{- else }}
  {{- with .affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with .topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .dnsConfig }}
  dnsConfig:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .hostAliases }}
  hostAliases:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $.component }}
      image: {{ $.image | default (include "tms.image" $root) | quote }}
      imagePullPolicy: {{ .image.pullPolicy }}
      {{- with $.command }}
      command: {{ toJson . }}
      {{- end }}
      args: {{ toJson $.args }}
      securityContext:
        {{- toYaml (.securityContext | default dict) | nindent 8 }}
      resources:
        {{- include "tms.resources" (dict "root" $root "component" $.component "given" ($own.resources | default $.resources | default .resources | default dict)) | nindent 8 }}
      {{- with include "tms.env" (dict "root" $root "env" $.env) | fromJsonArray }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $.ports }}
      ports:
        {{- range $name, $port := . }}
        - name: {{ $name }}
          containerPort: {{ int $port }}
        {{- end }}
      {{- end }}
      {{- with $.probes }}
      {{- mustMergeOverwrite (deepCopy .) ($own.probes | default dict) | toYaml | nindent 6 }}
      {{- end }}
      volumeMounts:
        - name: config
          mountPath: /etc/tms
          readOnly: true
        - name: data
          mountPath: /var/lib/tms
        - name: tmp
          mountPath: /tmp
        {{- if .existingSecret }}
        - name: secrets
          mountPath: /etc/tms-secrets
          readOnly: true
        {{- end }}
        {{- with .extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- /* The pod of a run never completes if a container in it keeps running. */}}
    {{- with ternary .extraContainers $own.extraContainers (empty $.restartPolicy) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ $.config | default (include "tms.fullname" $root) }}
    - name: data
      {{- if and .persistence.enabled $.data }}
      persistentVolumeClaim:
        claimName: {{ .persistence.existingClaim | default (include "tms.fullname" $root) }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: tmp
      emptyDir: {}
    {{- if .existingSecret }}
    - name: secrets
      secret:
        secretName: {{ .existingSecret }}
        defaultMode: 0440
    {{- end }}
    {{- with .extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

{{/* The template of executor pods on Kubernetes. Spark sets their memory and command. */}}
{{- define "tms.executor" -}}
{{- $pod := include "tms.pod" (dict "root" . "component" "executor" "image" (include "tms.sparkImage" .) "args" list "restartPolicy" "Never" "data" (eq (include "tms.sparkKeepsFiles" .) "yes")) | fromYaml }}
{{- $_ := unset (first $pod.spec.containers) "resources" }}
{{- merge (dict "apiVersion" "v1" "kind" "Pod") $pod | toPrettyJson }}
{{- end }}

{{/* Startup, liveness and readiness probes. Takes a dict: root; path (ready), port name (port) and tls of the readiness probe. */}}
{{- define "tms.probes" -}}
{{- $seconds := int .root.Values.probePeriodSeconds }}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 5
  failureThreshold: {{ max 1 (div (int .root.Values.startupSeconds) 5) }}
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: {{ $seconds }}
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: {{ .ready | default "/readyz" }}, port: {{ .port | default "metrics" }}{{ if .tls }}, scheme: HTTPS{{ end }}}
  periodSeconds: {{ $seconds }}
  timeoutSeconds: 5
{{- end }}

{{/* The janitor's variables with the address of the transaction manager, if this chart runs it. */}}
{{- define "tms.janitorEnv" -}}
{{- if include "tms.hasManager" . }}
- {name: TMS_TRANSACTIONS__SOURCE, value: thrift}
- {name: TMS_TRANSACTIONS__THRIFT, value: {{ include "tms.transactionsAddress" . | quote }}}
{{- else }}
[]
{{- end }}
{{- end }}

{{/* The variables with which `tms` finds the server and the transaction service of its own pod. */}}
{{- define "tms.clientEnv" -}}
- {name: TMS_CONFIG, value: /etc/tms/tms.yaml}
{{- end }}

{{/* The longest distance between two values of a crontab field. Takes a dict: field; size, the number of values. */}}
{{- define "tms.cronGap" -}}
{{- $size := int .size }}{{ $named := list }}{{ $gap := 0 }}{{ $last := -1 }}
{{- range splitList "," .field }}
{{- $parts := splitList "/" . }}
{{- $ends := first $parts | replace "?" "*" | replace "*" (printf "0-%d" (sub $size 1)) | splitList "-" }}
{{- $to := ternary (sub $size 1) (last $ends | int64) (and (eq (len $ends) 1) (gt (len $parts) 1)) }}
{{- range untilStep (first $ends | int) (add1 $to | int) (ternary (last $parts) "1" (gt (len $parts) 1) | int) }}
{{- $named = append $named (mod . $size) }}
{{- end }}
{{- end }}
{{- range until (mul 2 $size | int) }}
{{- if has (mod . $size) $named }}
{{- if ge $last 0 }}{{ $gap = max $gap (sub . $last) }}{{ end }}
{{- $last = . }}
{{- end }}
{{- end }}
{{- $gap }}
{{- end }}

{{/* The longest time between two runs of a crontab in seconds, or slightly more. */}}
{{- define "tms.cronSeconds" -}}
{{- $named := dict "@hourly" "0 * * * *" "@daily" "0 0 * * *" "@midnight" "0 0 * * *" "@weekly" "0 0 * * 0" "@monthly" "0 0 1 * *" "@yearly" "0 0 1 1 *" "@annually" "0 0 1 1 *" }}
{{- $fields := regexSplit "\\s+" (get $named . | default . | trim | upper | replace "?" "*") -1 }}
{{- $minute := index $fields 0 }}{{ $hour := index $fields 1 }}{{ $day := index $fields 2 }}{{ $weekday := index $fields 4 }}
{{- range $number, $name := list "SUN" "MON" "TUE" "WED" "THU" "FRI" "SAT" }}
{{- $weekday = replace $name (toString $number) $weekday }}
{{- end }}
{{- if ne (index $fields 3) "*" }}31622400
{{- else if regexMatch "^(29|3[01])([,-](29|3[01]))*$" $day }}{{ mul 61 86400 }}
{{- else if regexMatch "29|3[01]" $day }}{{ mul 31 86400 }}
{{- else if ne $day "*" }}{{ include "tms.cronGap" (dict "field" $day "size" 31) | int64 | mul 86400 }}
{{- else if ne $weekday "*" }}{{ include "tms.cronGap" (dict "field" $weekday "size" 7) | int64 | mul 86400 }}
{{- else if ne $hour "*" }}{{ include "tms.cronGap" (dict "field" $hour "size" 24) | int64 | mul 3600 }}
{{- else }}{{ include "tms.cronGap" (dict "field" $minute "size" 60) | int64 | mul 60 }}
{{- end }}
{{- end }}
