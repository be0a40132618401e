# make test   the tests of all modules; RACE=1 adds the race detector, TESTFLAGS adds flags
# make check  what a change has to pass: lint, tidy, exported API, the core on its own, fuzz targets, tests
# make fleet  the whole matrix of fleet runs (about 15 minutes), where make test runs a part of it
# make spec   the models of docs/spec, explored to the end (under a minute; TIERLIMIT_LONG=1 adds larger ones)
# make sim    fleets of up to 1,000 instances in virtual time (about 15 minutes), written to docs/simulation.md
# make bench  everything side by side with its peers (about 20 minutes; BENCH=quick: a few), written to docs/benchmarks.md
# make chaos-report  the chaos suite at length, in containers too (about 15 minutes), written to docs/chaos.md
# make soak   one fleet under faults at random for SOAK=30m, written to docs/chaos.md
# make api    records the exported API in api/, to be committed with the change that alters it
# make lint, make tidy, make core, make fuzz (FUZZTIME=30000x: inputs for each target): parts of make check

GO        ?= go
RACE      ?=
TESTFLAGS ?=
FUZZTIME  ?= 30000x
SOAK      ?= 30m

race = $(if $(filter-out 0,$(RACE)),-race)

# Each module but tools, which is not in the workspace; "go work" knows them.
modules = $(shell $(GO) list -m -f '{{.Dir}}')

.PHONY: test fleet spec sim bench check lint tidy api api-check core fuzz chaos-report soak

# The container tests are left out where scripts/containers.sh says why; TIERLIMIT_CONTAINERS=1 makes that an error. They run after
# the others: two chaos suites side by side would take each other's processor time, and judge nothing.
test:
	@sh scripts/redis.sh
	@set -e; image=$$(sh scripts/containers.sh); set -x; \
	$(GO) test $(race) -timeout 40m $(TESTFLAGS) $(patsubst %,%/...,$(filter-out %/internal/containertest,$(modules))); \
	[ -z "$$image" ] || TIERLIMIT_REDIS_IMAGE=$$image $(GO) test $(race) -timeout 40m $(TESTFLAGS) ./internal/containertest/...

fleet:
	@sh scripts/redis.sh
	TIERLIMIT_LONG=1 $(GO) test $(race) -count=1 -timeout 60m -v -run '^TestFleet' $(TESTFLAGS) .

spec:
	sh scripts/spec.sh

sim:
	@sh scripts/redis.sh
	TIERLIMIT_LONG=1 TIERLIMIT_SIM=$(CURDIR)/docs/simulation.md $(GO) test -count=1 -timeout 90m -v -run '^TestSim' $(TESTFLAGS) .

bench:
	@sh scripts/redis.sh
	$(GO) run ./bench/cmd/bench $(if $(filter quick,$(BENCH)),-quick)

chaos-report:
	@sh scripts/redis.sh
	@sh scripts/chaos-report.sh

# The page is written whether it fails or not.
soak:
	@sh scripts/redis.sh
	@mkdir -p bin && rm -f bin/soak.json
	@failed=0; TIERLIMIT_SOAK=$(SOAK) TIERLIMIT_SOAK_RESULT=$(CURDIR)/bin/soak.json \
	$(GO) test -count=1 -v -timeout 0 -run '^TestSoak$$' ./internal/chaos || failed=1; \
	$(GO) run ./internal/chaosreport -soak bin/soak.json -command 'make soak SOAK=$(SOAK)' && exit $$failed

check: lint tidy api-check core fuzz test

lint: bin/golangci-lint
	@set -e; for dir in $(modules); do echo "lint $$dir"; (cd "$$dir" && "$(CURDIR)/bin/golangci-lint" run ./...); done

# Built from the tools module, so that neither its version nor its requirements touch a user's go.mod.
bin/golangci-lint: tools/go.mod
	GOWORK=off $(GO) -C tools build -o ../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint

tidy:
	@set -e; for dir in $(modules) $(CURDIR)/tools; do echo "tidy $$dir"; (cd "$$dir" && GOWORK=off $(GO) mod tidy -diff); done

api:
	$(GO) run ./internal/apilist

api-check:
	$(GO) run ./internal/apilist -check

# The root module as its users see it: alone, without the workspace.
core:
	GOWORK=off $(GO) build ./...
	GOWORK=off $(GO) vet ./...

fuzz:
	sh scripts/fuzz.sh $(FUZZTIME)
