# The image of `janitor` and `tms`: Python, its packages and their libraries; no shell, package manager or compiler.
#
#   make image                              with the base image below
#   make image BASE_IMAGE=registry/python   with another Debian image that has only Python and its venv module
#   make image ARCHIVE=1                    with Parquet too, for janitor.archive, 160 MB larger
#   make image KERBEROS=1                   with gssapi and MIT Kerberos too, for storage.hbase.kerberos
#
# image/rootfs.py copies the needed files from the base image. For a reproducible image, set BASE_IMAGE to
# NAME:TAG@sha256:…, which `docker buildx imagetools inspect NAME:TAG` prints, because a tag can move. The label
# org.opencontainers.image.base.name records BASE_IMAGE.
#
# The base needs Python 3.12, 3.13 or 3.14, for which the faster LevelDB driver (docs/reference/compatibility.md) has a
# wheel. COMPILED lists the packages to compile, for a base or processor without wheels.
#
# image/*.lock pins the installed packages with their checksums. If pip needs the certificate of a private CA, pass it
# as a secret (`--secret id=ca,src=ca.pem`; `make image` passes PIP_CERT); the image does not contain it.
ARG BASE_IMAGE=python:3.13-slim-trixie

FROM ${BASE_IMAGE} AS build
ARG ARCHIVE=
ARG COMPILED=
ARG KERBEROS=
WORKDIR /src
RUN if [ -n "${COMPILED}${KERBEROS}" ]; then \
      apt-get update -qq && apt-get install -qq -y --no-install-recommends g++ python3-dev \
        ${COMPILED:+libleveldb-dev} ${KERBEROS:+libkrb5-dev}; fi
COPY image/build.lock image/runtime.lock image/archive.lock image/kerberos.lock image/
RUN --mount=type=secret,id=ca,target=/run/ca.pem \
    if [ -s /run/ca.pem ]; then export PIP_CERT=/run/ca.pem; fi; \
    python3 -m venv /opt/build && python3 -m venv --without-pip /opt/tms \
    && /opt/build/bin/pip install --no-cache-dir --quiet --no-deps --require-hashes -r image/build.lock \
    && /opt/build/bin/pip wheel --no-cache-dir --quiet --no-deps --require-hashes --only-binary :all: --no-binary "${COMPILED:-:none:}${KERBEROS:+,gssapi}" \
       --no-build-isolation --wheel-dir /tmp/wheels -r image/runtime.lock ${ARCHIVE:+-r image/archive.lock} \
       ${KERBEROS:+-r image/kerberos.lock} \
    && /opt/build/bin/pip --python /opt/tms/bin/python install --no-cache-dir --quiet --no-deps --no-index /tmp/wheels/*.whl
COPY pyproject.toml README.md LICENSE ./
COPY tms_core tms_core
COPY janitor janitor
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir /tmp/wheel . \
    && /opt/build/bin/pip --python /opt/tms/bin/python install --no-cache-dir --quiet --no-deps --no-index /tmp/wheel/*.whl
# The kernel drops a SIGTERM to a container's first process that has no handler yet, unless the signal is blocked.
# Therefore env blocks it until Python has started (tms_core/cli/entry.py); this needs GNU coreutils 8.31 or newer.
RUN sed -i '1s|.*|#!/usr/bin/env -S --block-signal=TERM /opt/tms/bin/python|' /opt/tms/bin/janitor /opt/tms/bin/tms
COPY image/rootfs.py image/sbom.py image/
RUN /opt/tms/bin/python image/rootfs.py /opt/tms /rootfs \
    && /opt/tms/bin/python image/sbom.py /rootfs/var/lib/dpkg/status.d > /rootfs/opt/tms/sbom.cdx.json \
    && chroot /rootfs /opt/tms/bin/janitor --version && chroot /rootfs /opt/tms/bin/tms --version && mkdir /opt/data

FROM scratch
COPY --from=build /rootfs /
# The programs write only to /var/lib/tms and /tmp.
COPY --from=build --chown=65532:65532 /opt/data /var/lib/tms
ENV PATH=/opt/tms/bin:/usr/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 LANG=C.UTF-8 \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
USER 65532:65532
WORKDIR /var/lib/tms
EXPOSE 9847 11015 15165
STOPSIGNAL SIGTERM
ENTRYPOINT ["janitor"]
CMD ["--help"]
ARG BASE_IMAGE
ARG VERSION=
ARG REVISION=
ARG SOURCE=
LABEL org.opencontainers.image.title="tms-janitor" \
      org.opencontainers.image.description="Cleans CDAP's Transactional Messaging System from outside" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
