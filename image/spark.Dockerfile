# The janitor with Spark and Java: for drivers (`janitor spark …`), and for their executors on Kubernetes.
#
#   make image-spark                                   with the base image below
#   make image-spark BASE_IMAGE=registry/python        with another Debian image that has Python and its venv module
#   make image-spark KERBEROS=1                        with gssapi and MIT Kerberos too, for storage.hbase.kerberos
#
# Pinned base images, the lock files and the secret `ca` work as in Dockerfile.
ARG BASE_IMAGE=python:3.13-slim-trixie

FROM ${BASE_IMAGE} AS build
ARG KERBEROS=
WORKDIR /src
RUN if [ -n "${KERBEROS}" ]; then \
      apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc python3-dev libkrb5-dev; fi
COPY image/build.lock image/spark.lock image/kerberos.lock image/
# PySpark is published only as a source distribution: Python modules and jars.
RUN --mount=type=secret,id=ca,target=/run/ca.pem \
    if [ -s /run/ca.pem ]; then export PIP_CERT=/run/ca.pem; fi; \
    python3 -m venv /opt/build && python3 -m venv --without-pip /opt/tms \
    && /opt/build/bin/pip install --no-cache-dir --quiet --no-deps --require-hashes -r image/build.lock \
    && /opt/build/bin/pip wheel --no-cache-dir --quiet --no-deps --require-hashes --only-binary :all: --no-binary "pyspark${KERBEROS:+,gssapi}" \
       --no-build-isolation --wheel-dir /tmp/wheels -r image/spark.lock ${KERBEROS:+-r image/kerberos.lock} \
    && /opt/build/bin/pip --python /opt/tms/bin/python install --no-cache-dir --quiet --no-deps --no-index /tmp/wheels/*.whl
COPY pyproject.toml README.md LICENSE ./
COPY tms_core tms_core
COPY janitor janitor
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir /tmp/wheel . \
    && /opt/build/bin/pip --python /opt/tms/bin/python install --no-cache-dir --quiet --no-deps --no-index /tmp/wheel/*.whl
COPY image/spark_start.py /opt/tms/
RUN mkdir /opt/data

FROM ${BASE_IMAGE}
ARG BASE_IMAGE
ARG JAVA=openjdk-21-jre-headless
ARG KERBEROS=
# The Java package links manual pages, whose folder slim images lack. Hadoop needs a user name for the numeric user id.
RUN mkdir -p /usr/share/man/man1 && apt-get update -qq && apt-get install -qq -y --no-install-recommends ${JAVA} ${KERBEROS:+libgssapi-krb5-2} && rm -rf /var/lib/apt/lists/* \
    && rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/site-packages/pip* \
       /usr/local/lib/python3*/site-packages/setuptools* /usr/local/lib/python3*/site-packages/wheel* \
    && echo 'tms:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'tms:x:65532:' >> /etc/group
COPY --from=build /opt/tms /opt/tms
RUN --mount=type=bind,source=image/sbom.py,target=/tmp/sbom.py /opt/tms/bin/python /tmp/sbom.py > /opt/tms/sbom.cdx.json
COPY --from=build --chown=65532:65532 /opt/data /var/lib/tms
ENV PATH=/opt/tms/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 LANG=C.UTF-8
USER 65532:65532
WORKDIR /var/lib/tms
STOPSIGNAL SIGTERM
# A SIGTERM before the start of Python or Java stays pending until then (see Dockerfile).
ENTRYPOINT ["/usr/bin/env", "--block-signal=TERM", "/opt/tms/bin/python", "/opt/tms/spark_start.py"]
CMD ["--help"]
ARG VERSION=
ARG REVISION=
ARG SOURCE=
LABEL org.opencontainers.image.title="tms-janitor-spark" \
      org.opencontainers.image.description="Cleans CDAP's Transactional Messaging System from outside, on Spark" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
