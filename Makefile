# Everything is installed inside the tree (.venv), nothing on the machine but a cache of built programs. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup tools kubebox engine run demo hbase test test-fast packages fuzz lint audit bench generate docs docs-serve pictures image image-spark publisher chart publish release-notes lock system-deps test-cluster clean

VENV := .venv
PY := $(VENV)/bin/python
#: Marks of installed packages: for running, and for testing.
RUN_STAMP := $(VENV)/.runtime
STAMP := $(VENV)/.installed
#: Programs for tests, built from the versions and checksums in each go.mod and go.sum.
BIN := .tools/bin
#: All clones of a user share these builds; each set of sources has a folder.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tms-janitor
HELM_VERSION = $(shell awk '$$1 == "helm.sh/helm/v3" {print $$2; exit}' tests/chart/tools/go.mod)
KUBERNETES_VERSION = $(shell awk '$$1 == "k8s.io/kubernetes" {print $$2; exit}' tests/cluster/kubebox/go.mod)
#: Builds the packages $(2) of the Go module in the folder $(1), with the linker options $(3), unless they are built; $(4) is appended to
#: their names.
#: Go's caches are ten times as large as the programs, and are deleted. A folder in the cache is complete or absent.
define built
@place="$(CACHE)/$$(cat $(1)/go.mod $(1)/go.sum $(wildcard $(1)/*.go) | sha256sum | cut -c 1-16)-$$(uname -sm | tr ' ' -)"; \
if [ ! -d "$$place" ]; then \
  command -v go >/dev/null || { echo "go is missing; install Go 1.26 (https://go.dev/dl)" >&2; exit 1; }; \
  echo "building the programs of $(1), once for all clones; this takes a few minutes"; \
  mkdir -p "$(CACHE)"; work=$$(mktemp -d "$(CACHE)/building-XXXXXX"); trap 'rm -rf "$$work"' EXIT; \
  (cd $(1) && CGO_ENABLED=0 GOMODCACHE="$$work/mod" GOCACHE="$$work/build" GOGC=50 \
    go build -p 2 -modcacherw -mod=readonly -trimpath -buildvcs=false -o "$$work/bin/" -ldflags "-s -w $(3)" $(2)); \
  [ -d "$$place" ] || mv "$$work/bin" "$$place"; \
fi; \
mkdir -p $(BIN); for program in "$$place"/*; do ln -sf "$$program" "$(BIN)/$$(basename "$$program")$(4)"; done
endef
#: The modules that decide about deletions: tests must cover all their branches.
RULES := tms_core/rowkey.py,janitor/rules/policy.py,janitor/rules/ranges.py,janitor/boundary.py
#: The tests of these modules; they are always traced.
RULES_TESTS := tests/janitor/rules tests/janitor/boundary tests/test_rowkey.py
#: Tests that check another Python or processor in minutes: every store, the client, the rules. They need no Java.
FAST := tests/contract tests/tables tests/client tests/consumers tests/transaction tests/janitor/rules tests/janitor/boundary \
  tests/janitor/state tests/janitor/sweep tests/test_api.py tests/test_clock.py tests/test_errors.py tests/test_rowkey.py tests/test_side.py tests/test_topic.py
#: Whether the coverage of all code is measured, which takes a fifth longer; CI does it.
COVERAGE ?= $(filter-out 0 false,$(CI))
TRACED := --cov --cov-report=
# Half of the time tests wait for something, so there are more of them at work than processors.
WORKERS ?= 4
PYTEST_ARGS ?=
BENCH ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes; without its bytecode each would compile the project again, and so would each worker all tests.
export PYTHONDONTWRITEBYTECODE :=

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- setting up ------------------------------------------------------------------------------------------------------

setup: $(STAMP) ## install the locked versions into .venv (other targets do this if needed)

# Python 3.12 and newer are preferred, for their faster LevelDB (docs/reference/compatibility.md); where 3.11 would need a compiler it is passed over.
HAS_WHEELS = import platform, sys; sys.exit(not (3, 11 + (platform.machine() != "x86_64")) <= sys.version_info[:2] <= (3, 14))
$(RUN_STAMP): requirements-run.lock pyproject.toml
	@if [ ! -x $(PY) ]; then \
	  for candidate in "$${PYTHON:-}" python3.12 python3.13 python3.14 python3 python3.11; do \
	    [ -n "$$candidate" ] && "$$candidate" -c '$(HAS_WHEELS)' 2>/dev/null || continue; \
	    echo "setting up $(VENV) with $$("$$candidate" --version); this takes about a minute"; \
	    "$$candidate" -m venv $(VENV) || { rm -rf $(VENV); \
	      echo "the venv module is missing; install it: apt-get install python3-venv" >&2; exit 1; }; \
	    break; \
	  done; \
	  [ -x $(PY) ] || { echo "Python 3.11 to 3.14 (on arm64 3.12 to 3.14) is missing; install it: apt-get install python3 python3-venv" >&2; exit 1; }; \
	fi
	@$(PY) -m pip install --quiet --no-deps --require-hashes -r requirements-run.lock || { \
	  echo "the locked packages could not be installed; see pip's error above" >&2; exit 1; }
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Older versions of pip install PySpark, which has no wheel, without a list of its files.
$(STAMP): requirements.lock $(RUN_STAMP)
	@echo "installing the packages of the tests into $(VENV)"
	@$(PY) -m pip install --quiet --no-deps --use-pep517 --require-hashes -r requirements.lock || { \
	  echo "the locked packages of the tests could not be installed; see pip's error above" >&2; exit 1; }
	@touch $@

lock: $(STAMP) ## resolve the dependencies of pyproject.toml again into the lock files
	$(VENV)/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --upgrade \
	  --generate-hashes --no-annotate --custom-compile-command 'make lock' --quiet --output-file requirements.lock
	echo hatchling | $(VENV)/bin/uv pip compile pyproject.toml - --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --constraint requirements.lock --custom-compile-command 'make lock' --quiet --output-file requirements-run.lock
	$(VENV)/bin/uv pip compile pyproject.toml --extra jwt --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --constraint requirements.lock \
	  --custom-compile-command 'make lock' --quiet --output-file image/runtime.lock
	echo pyarrow | $(VENV)/bin/uv pip compile - --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --constraint requirements.lock --custom-compile-command 'make lock' --quiet --output-file image/archive.lock
	$(VENV)/bin/uv pip compile pyproject.toml --extra archive --extra jwt --extra spark --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --constraint requirements.lock \
	  --custom-compile-command 'make lock' --quiet --output-file image/spark.lock
	echo gssapi | $(VENV)/bin/uv pip compile - --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --constraint requirements.lock --custom-compile-command 'make lock' --quiet --output-file image/kerberos.lock
	$(VENV)/bin/uv pip compile image/build.in --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --constraint requirements.lock --custom-compile-command 'make lock' --quiet --output-file image/build.lock

# RUNLEVEL=1 keeps the packages from starting their services.
system-deps: ## install the Debian packages that some tests use when present (needs root)
	@missing=; for name in chromium prometheus; do command -v $$name >/dev/null || missing="$$missing $$name"; done; \
	[ -n "$$missing" ] || { echo "system-deps: nothing to do"; exit 0; }; \
	[ "$$(id -u)" = 0 ] || { echo "system-deps needs root: sudo make system-deps" >&2; exit 1; }; \
	command -v apt-get >/dev/null || { echo "system-deps needs Debian's apt-get; install$$missing with your package manager" >&2; exit 1; }; \
	apt-get update -qq || { echo "system-deps failed at: apt-get update" >&2; exit 1; }; \
	RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing || { \
	  echo "system-deps failed at: apt-get install$$missing" >&2; exit 1; }

# Nothing that Python's, Node's, Java's, Rust's or Debian's packages hold has these programs, so they are built from Go's modules.
tools: ## build helm (3 and 4), helm-unittest and kubeconform, a few minutes, once for all clones (`make test` does this if needed)
	$(call built,tests/chart/tools,tool,-X helm.sh/helm/v3/internal/version.version=$(HELM_VERSION))
	$(call built,tests/chart/helm4,tool,,4)

publisher: ## build cosign and crane, which sign and publish, 10 minutes, once for all clones (`make test-cluster` does this if needed)
	$(call built,image/publisher,tool)

K8S := k8s.io/component-base/version
kubebox: ## build a Kubernetes node, in one program, for `make test-cluster`: 10 to 25 minutes and 3 GB of memory, once for all clones
	$(call built,tests/cluster/kubebox,.,-X $(K8S).gitVersion=$(KUBERNETES_VERSION) -X $(K8S).gitMajor=1 \
	  -X $(K8S).gitMinor=$(word 2,$(subst ., ,$(KUBERNETES_VERSION))) -X $(K8S).gitTreeState=clean \
	  -X $(K8S).gitCommit=local -X $(K8S).buildDate=2026-01-01T00:00:00Z)

#: Debian's packages for the container engine and the node of the tests, and for a base image.
#: The first name is also a registry's host name, which must not appear in this project.
dot := .
ENGINE := docker$(dot)io containerd runc debootstrap libdevmapper1.02.1 containernetworking-plugins iptables conntrack \
  libxtables12 libnftnl11 libmnl0 libip4tc2 libip6tc2 libnfnetlink0 libnetfilter-conntrack3

VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
#: Not empty: with Parquet, for janitor.archive. The chart uses the image with this tag if the archive is on.
ARCHIVE ?=
#: Not empty: with gssapi and MIT's library, for storage.hbase.kerberos and transactions.kerberos.
KERBEROS ?=
IMAGE ?= tms-janitor:$(VERSION)$(if $(ARCHIVE),-archive)$(if $(KERBEROS),-kerberos)
SPARK_IMAGE ?= $(IMAGE)-spark
BASE_IMAGE ?=
#: The revision of the image and the address of its source; labels of the image.
REVISION ?= $(shell git rev-parse HEAD 2>/dev/null)
SOURCE ?=
#: Further options of `docker build`, such as --platform.
BUILD_OPTIONS ?=
DOCKER_BUILD = DOCKER_BUILDKIT=1 docker build $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
  --build-arg KERBEROS=$(KERBEROS) --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) --build-arg SOURCE=$(SOURCE) \
  $(if $(PIP_CERT),--secret id=ca$(comma)src=$(PIP_CERT)) $(BUILD_OPTIONS)

image: ## build the container image: make image IMAGE=NAME:TAG BASE_IMAGE=python:3.13-slim-trixie ARCHIVE=1
	$(DOCKER_BUILD) --build-arg ARCHIVE=$(ARCHIVE) --tag $(IMAGE) .
	@mkdir -p build && made=$$(docker create $(IMAGE)) && docker cp $$made:/opt/tms/sbom.cdx.json build/sbom.cdx.json && docker rm $$made >/dev/null
	@echo "contents of the image: build/sbom.cdx.json"

image-spark: ## build the image for Spark, of drivers and executors: make image-spark SPARK_IMAGE=NAME:TAG
	$(DOCKER_BUILD) --file image/spark.Dockerfile --tag $(SPARK_IMAGE) .

comma := ,

#: The registry for images and chart, with a path; the builder and the run that publish; and
#: a private key of cosign's. Without a key it signs as the workflow it runs in.
REGISTRY ?=
BUILDER ?= $(SOURCE)
INVOCATION ?= $(SOURCE)
SIGN_KEY ?=

chart: $(RUN_STAMP) ## package the chart for publishing into build/: make chart VERSION=0.1.0 SOURCE=https://… REGISTRY=…
	@[ -n "$(SOURCE)" ] && [ -n "$(REGISTRY)" ] || { echo "SOURCE or REGISTRY is missing; set both: make chart SOURCE=https://… REGISTRY=…" >&2; exit 1; }
	@$(PY) -m charts.package build/chart $(VERSION) $(SOURCE) $(REGISTRY) && $(BIN)/helm package build/chart/tms-janitor --destination build

publish: chart ## join, sign and publish the images of both architectures and the chart: make publish REGISTRY=… SOURCE=… SIGN_KEY=cosign.key
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PY) -m image.publish $(REGISTRY) $(VERSION) build/tms-janitor-$(VERSION).tgz \
	  --builder $(BUILDER) --invocation $(INVOCATION) $(if $(SIGN_KEY),--key $(SIGN_KEY))

release-notes: ## write the changelog entry of a version: make release-notes VERSION=0.1.0
	@mkdir -p build
	@awk -v head="## [$(VERSION)]" 'index($$0, "## ") == 1 {on = index($$0, head) == 1; next} on' CHANGELOG.md > build/release-notes.md
	@[ -s build/release-notes.md ] || { echo "CHANGELOG.md has no entry for version $(VERSION)" >&2; exit 1; }

engine: .tools/engine/.unpacked ## unpack Debian's container engine inside the tree, for `make test-cluster`

.tools/engine/.unpacked:
	@command -v apt-get >/dev/null || { echo "the engine comes from Debian's packages; elsewhere set DOCKER_HOST" >&2; exit 1; }
	@rm -rf .tools/engine; mkdir -p .tools/engine/packages; chmod 777 .tools/engine/packages
	@cd .tools/engine/packages && { apt-get download -qq $(ENGINE) || { apt-get update -qq && apt-get download -qq $(ENGINE); }; }
	@for package in .tools/engine/packages/*.deb; do dpkg-deb -x "$$package" .tools/engine; done
	@rm -rf .tools/engine/packages; touch $@

#: Debian's packages of a Kerberos server, of a wrong clock for it, and of the headers for gssapi, which has no wheels for Linux.
KRB5 := krb5-kdc krb5-admin-server krb5-user libkrb5-dev krb5-multidev comerr-dev libcom-err2 libss2 libev4 libverto1 \
  libfaketime libverto-libev1 libgssapi-krb5-2 libkrb5-3 libkrb5support0 libk5crypto3 libgssrpc4 libkdb5-10 libkadm5srv-mit12 libkadm5clnt-mit12
kerberos: .tools/krb5/.complete $(VENV)/.kerberos ## unpack Debian's Kerberos server inside the tree and compile gssapi (`make test` does this if needed)

.tools/krb5/.complete:
	@command -v apt-get >/dev/null || { echo "the Kerberos server of the tests comes from Debian's packages" >&2; exit 1; }
	@rm -rf .tools/krb5; mkdir -p .tools/krb5/packages; chmod 777 .tools/krb5/packages
	@cd .tools/krb5/packages && { apt-get download -qq $(KRB5) || { apt-get update -qq && apt-get download -qq $(KRB5); }; }
	@for package in .tools/krb5/packages/*.deb; do dpkg-deb -x "$$package" .tools/krb5; done
	@sed -i 's#=/usr#=$(CURDIR)/.tools/krb5/usr#' .tools/krb5/usr/bin/krb5-config.mit
	@rm -rf .tools/krb5/packages; touch $@

$(VENV)/.kerberos: image/kerberos.lock $(STAMP) .tools/krb5/.complete
	@CPATH=$(CURDIR)/.tools/krb5/usr/include PATH=$(CURDIR)/.tools/krb5/usr/bin:$$PATH \
	  GSSAPI_LINKER_ARGS="-L$$(echo $(CURDIR)/.tools/krb5/usr/lib/*/mit-krb5) -lgssapi_krb5 -lkrb5" \
	  $(PY) -m pip install --quiet --no-deps --require-hashes -r image/kerberos.lock
	@touch $@

# --- using it --------------------------------------------------------------------------------------------------------

run: $(RUN_STAMP) ## set up and serve a sample store with the janitor inside, and its status page, until Ctrl-C
	@$(PY) -m examples.tour

demo: $(RUN_STAMP) ## show the janitor at work on a sample store, in a minute
	@$(PY) -m examples.demo

hbase: $(STAMP) ## start a real HBase from Maven's jars (needs Java 17 and Maven) at ports 9090 and 9091; FILL=500000: with messages; Ctrl-C stops it
	@$(PY) -m tests.hbase.server $(if $(FILL),--fill $(FILL))

bench: $(STAMP) ## run all benchmarks, or the named ones: make bench BENCH="p1 p8"
	@$(PY) -m benchmarks.run $(BENCH)

generate: $(STAMP) ## write the files that are generated from code: alert rules, dashboard, the chart's schema, pages
	@$(PY) -m tools.reference.configuration
	@$(PY) -m tools.reference.api
	@$(PY) -m tools.reference.commands
	@$(PY) -m charts.generate

#: Renders the diagrams of the site, also without a network; npm is the only source.
MERMAID := 12.3.0
MERMAID_SHA256 := be0684e8d20bfc874df12c0f04927a5c482f57f2200eec54cca52a4583fd4040
docs/assets/mermaid.min.js:
	@command -v npm >/dev/null || { echo "npm is missing, so diagrams of the site need a network; install it: apt-get install npm" >&2; exit 0; }; \
	work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; cd "$$work"; \
	npm pack mermaid@$(MERMAID) --silent >/dev/null && echo "$(MERMAID_SHA256)  mermaid-$(MERMAID).tgz" | sha256sum --check --quiet && \
	tar xzf mermaid-$(MERMAID).tgz package/dist/mermaid.min.js && mkdir -p "$(CURDIR)/docs/assets" && \
	cp package/dist/mermaid.min.js "$(CURDIR)/$@"

docs: $(STAMP) docs/assets/mermaid.min.js ## build the documentation site into build/site; a broken link fails
	@$(VENV)/bin/zensical build --strict --clean

docs-serve: $(STAMP) docs/assets/mermaid.min.js ## build the documentation site and show it at http://localhost:8000/
	@$(VENV)/bin/zensical serve

pictures: $(STAMP) ## take the pictures of README and docs from the tour, with chromium and prometheus
	@$(PY) -m tools.pictures

# --- proving it ------------------------------------------------------------------------------------------------------

lint: $(STAMP) ## ruff, mypy --strict, the layers, dependencies, prose
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff check --quiet --preview --select DOC102 .  # docstrings that describe parameters which do not exist
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/deptry tms_core janitor
	$(PY) -m tools.prose --check

#: Options of pip-audit, such as --ignore-vuln ID.
AUDIT_OPTIONS ?=
LOCKS := requirements.lock image/runtime.lock image/archive.lock image/spark.lock image/build.lock image/kerberos.lock
audit: $(STAMP) ## look up known vulnerabilities of all locked packages, at osv.dev (needs the network)
	$(VENV)/bin/pip-audit --vulnerability-service osv --require-hashes --disable-pip --progress-spinner off $(LOCKS:%=-r %) $(AUDIT_OPTIONS)

# Coverage is judged on whole runs only: not when PYTEST_ARGS picks some of the tests.
# The chart's tests come last: what they run may have to be built first.
test: lint ## lint, then every test, then coverage of the deletion rules; of all with COVERAGE=1 or in CI: make test PYTEST_ARGS="-k ranges"
	@$(MAKE) --no-print-directory kerberos || echo "test: no Kerberos server, so its tests are skipped" >&2
	@for tool in java mvn; do command -v $$tool >/dev/null || \
	  echo "$$tool is missing, so the tests with CDAP's own classes cannot run; install it: apt-get install openjdk-17-jdk-headless maven" >&2; done
ifeq ($(strip $(PYTEST_ARGS)),)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(if $(COVERAGE),$(TRACED)) --ignore tests/chart $(RULES_TESTS:%=--ignore %)
	@$(MAKE) --no-print-directory tools || echo "test: the chart's tools could not be built" >&2
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(TRACED) $(if $(COVERAGE),--cov-append) tests/chart $(RULES_TESTS)
	@$(VENV)/bin/coverage report --include=$(RULES) --fail-under=100 --format=total >/dev/null || { \
	  $(VENV)/bin/coverage report --include=$(RULES) --show-missing; echo "the modules of the deletion rules are not covered completely" >&2; exit 1; }
	@echo "branch coverage: 100 % of the deletion rules"
ifneq ($(COVERAGE),)
	@$(VENV)/bin/coverage report --skip-covered --fail-under=95 --format=total >/dev/null || { \
	  $(VENV)/bin/coverage report --skip-covered --show-missing; echo "branch coverage is below 95 %" >&2; exit 1; }
	@echo "branch coverage: $$($(VENV)/bin/coverage report --format=total) % of all"
endif
else
	$(if $(findstring chart,$(PYTEST_ARGS)),@$(MAKE) --no-print-directory tools)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
endif

fuzz: $(STAMP) ## search for failures with new seeds for SECONDS, and print how to repeat one: make fuzz SECONDS=3600
	@$(PY) -m tests.fuzz $(SECONDS)

test-fast: $(STAMP) ## every store, the client and the rules, in minutes: make test-fast VENV=.venv3.13 PYTHON=python3.13
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(FAST) $(PYTEST_ARGS)

packages: $(STAMP) ## build sdist and wheel into dist/, check both, and try the wheel in a separate environment
	@rm -rf dist
	@$(PY) -m hatchling build --directory dist
	@$(PY) -m twine check --strict dist/*
	@$(PY) -m tools.installed dist/*.whl

# A part that cannot be had here is skipped, and named at the end.
# The programs are kept in the user's cache, the engine and its base image in .tools.
test-cluster: $(STAMP) ## tests with a real API server and a container engine; complete only as root on Debian
	@echo "test-cluster: building takes 20 to 40 minutes the first time, images and tests 20 more"
	@$(MAKE) --no-print-directory tools || echo "test-cluster: the chart's tools could not be built" >&2
	@$(MAKE) --no-print-directory kubebox || echo "test-cluster: no API server, so its tests are skipped" >&2
	@$(MAKE) --no-print-directory publisher || echo "test-cluster: no cosign, so its tests are skipped" >&2
	@[ -n "$${DOCKER_HOST:-}" ] || $(MAKE) --no-print-directory engine || echo "test-cluster: no container engine, so its tests are skipped" >&2
	TMS_TEST_CLUSTER=1 $(PY) -m pytest -rs --timeout 1800 tests/cluster $(PYTEST_ARGS)

clean: ## remove the files of builds and tests; never a store, never .venv
	rm -rf build dist htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache tests/interop/target tests/hbase/target tests/kafka/target
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
