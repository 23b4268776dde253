# The janitor, `tms` and nothing else: no compiler and no installer.
#
#   make image                              with the base image below
#   make image BASE_IMAGE=registry/python   with another one that has Python, its venv module and no more
#
# Tags move. For an image that can be made again give NAME:TAG@sha256:…, as `docker buildx imagetools inspect NAME:TAG`
# prints it; the image's label org.opencontainers.image.base.name keeps what was given.
#
# Python 3.11 or 3.12, on x86_64: plyvel has binary wheels for no others, and nothing is compiled here.
#
# What is installed, and by which checksums, is in image/*.lock. Behind a company's own certificate authority, give it as
# a secret (`--secret id=ca,src=ca.pem`, `make image` does so from PIP_CERT); it does not get into the image.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY image/build.lock image/runtime.lock image/
RUN --mount=type=secret,id=ca,target=/run/ca.pem \
    if [ -s /run/ca.pem ]; then export PIP_CERT=/run/ca.pem; fi; \
    python3 -m venv /opt/build && python3 -m venv --without-pip /opt/tms \
    && /opt/build/bin/pip install --no-cache-dir --quiet --require-hashes -r image/build.lock \
    && /opt/build/bin/pip --python /opt/tms/bin/python install --no-cache-dir --quiet --require-hashes --only-binary :all: \
       -r image/runtime.lock
COPY pyproject.toml README.md LICENSE ./
COPY tms_core tms_core
COPY janitor janitor
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir /tmp/wheel . \
    && /opt/build/bin/pip --python /opt/tms/bin/python install --no-cache-dir --quiet --no-deps --no-index /tmp/wheel/*.whl
# The kernel drops a SIGTERM for the first process of a container that has no handler yet, unless it is blocked. So it is,
# until Python has begun (tms_core/cli/entry.py); this needs the env of GNU coreutils 8.31 or newer.
RUN sed -i '1s|.*|#!/usr/bin/env -S --block-signal=TERM /opt/tms/bin/python|' /opt/tms/bin/janitor /opt/tms/bin/tms \
    && /opt/tms/bin/janitor --version && /opt/tms/bin/tms --version
COPY image/sbom.py image/
RUN /opt/tms/bin/python image/sbom.py > /opt/tms/sbom.cdx.json && mkdir /opt/data

FROM ${BASE_IMAGE}
ARG BASE_IMAGE
LABEL org.opencontainers.image.title="tms-janitor" \
      org.opencontainers.image.description="Cleans CDAP's Transactional Messaging System from outside" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
# What some base images bring along to install packages with.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/site-packages/pip* \
    /usr/local/lib/python3*/site-packages/setuptools* /usr/local/lib/python3*/site-packages/wheel*
COPY --from=build /opt/tms /opt/tms
# The janitor writes there and to /tmp, and nowhere else.
COPY --from=build --chown=65532:65532 /opt/data /var/lib/tms
ENV PATH=/opt/tms/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 LANG=C.UTF-8
USER 65532:65532
WORKDIR /var/lib/tms
EXPOSE 9847 11015 15165
STOPSIGNAL SIGTERM
ENTRYPOINT ["janitor"]
CMD ["--help"]
