# SPDX-License-Identifier: GPL-2.0-or-later
.DEFAULT_GOAL := build
.PHONY: all build stock inject guest kernel aarch64 check-quick check check-slow demo soak fuzz bench bench-begin bench-demand-paging bench-postcopy bench-postcopy-more bench-breakdown bench-model bench-guest-time bench-snapshot bench-async bench-counter lab-shell branch help

# Of the hosts that QEMU is for: with ARCH=aarch64, build, stock, guest, kernel, demo and
# lab-shell are for arm64, in build/*-aarch64.
ARCH ?= x86_64
ifeq ($(ARCH),aarch64)
S = -aarch64
else ifneq ($(ARCH),x86_64)
$(error ARCH is $(ARCH): there are x86_64 and aarch64)
endif

# What the tests and the demo run; "scripts/ninja build/fork" builds all that QEMU has.
FORK = qemu-system-$(ARCH) tests/qtest/migration-test tests/qtest/postcopy-fault-exits-test
ifeq ($(ARCH),x86_64)
FORK += tests/unit/test-postcopy-request tests/unit/test-postcopy-place \
	tests/unit/test-postcopy-mirror tests/unit/test-postcopy-async \
	tests/unit/test-guest-time tests/unit/test-guest-time-arm \
	tests/unit/test-snapshot-holes
endif
PYTEST = build/venv/bin/python -m pytest -rs --durations=10
# Two at a time, each with a first-level machine of its own; one of them has the arm64 one, too.
PYTEST_2 = $(PYTEST) -n 2 --dist loadgroup

all: build
build:           ## build the fork: build/fork/qemu-system-x86_64 (make ARCH=aarch64: for arm64)
	@scripts/setup fork $(ARCH)
	@scripts/ninja build/fork$(S) $(FORK)

stock: build     ## build the same QEMU without our series: build/stock/qemu-system-x86_64
	@scripts/setup stock $(ARCH)
	@scripts/ninja build/stock.d/fork$(S) qemu-system-$(ARCH)

inject: build    ## build the fork with points at which tests hold and fail its threads: build/inject
	@scripts/setup inject $(ARCH)
	@scripts/ninja build/inject$(S) qemu-system-$(ARCH)

guest: build     ## build the guest payload, the Linux guest and the raw KVM bench: build/guest, build/bench
	@$(MAKE) -s -C tests/guest ARCH=$(ARCH) O=$(CURDIR)/build/guest$(S)
	@$(if $(S),,build/venv/bin/python tests/lab/linux_guest.py)
	@$(MAKE) -s -C tests/bench/demand-paging $(if $(S),CROSS=aarch64-linux-gnu-) O=$(CURDIR)/build/bench$(S)

kernel:          ## build the lab's Linux, once for all clones
	@scripts/deps lab kernel $(S:-%=%)
	@tests/lab/kernel/build $(ARCH) >/dev/null

aarch64:         ## build all that the arm64 lab needs
	@$(MAKE) -s ARCH=aarch64 stock inject guest kernel

check-quick: build ## under two minutes: style, series, unit tests
	@$(PYTEST) tests/quick

check: stock inject guest kernel aarch64 ## check-quick, QEMU's migration qtests on TCG, the tests in the lab
	@$(PYTEST_2) -m 'not slow' tests

check-slow: stock inject guest kernel aarch64 ## all tests there are
	@$(PYTEST_2) tests

demo: guest kernel ## migrate a busy guest post-copy in the lab, exits on, then off
	@build/venv/bin/python tests/demo/demo.py --arch $(ARCH)

BENCH = build/venv/bin/python tests/bench
BENCH_OPTIONS = $(if $(QUICK),--quick)
BENCHES = bench-demand-paging bench-postcopy $(if $(QUICK),,bench-postcopy-more) bench-breakdown \
	$(if $(QUICK),,bench-model) bench-guest-time bench-snapshot bench-async
bench: bench-begin $(BENCHES) ## all benches, then build/reports/report.md; QUICK=1: the short ones, in five minutes
	@$(BENCH)/report.py

bench-begin:
	@rm -f build/reports/*.md

# One after the other, also with make -j.
.NOTPARALLEL: bench

bench-demand-paging: guest kernel ## faults of a raw KVM guest: exits against userfaultfd, in the lab
	@$(BENCH)/demand_paging.py $(BENCH_OPTIONS)

bench-postcopy: stock guest kernel ## post-copy of stock QEMU and of the fork, exits off and on, measured in the lab
	@$(BENCH)/postcopy.py $(BENCH_OPTIONS)

bench-postcopy-more: stock guest kernel ## the same with other numbers of vCPUs, other loads, and a network with delay
	@$(BENCH)/postcopy.py --name postcopy-vcpus --backends anonymous --transport unix --cpus 1 2 4 8 --rounds 3
	@$(BENCH)/postcopy.py --name postcopy-loads --backends anonymous --load sequential shared zeros --rounds 3
	@$(BENCH)/postcopy.py --name postcopy-network --backends anonymous --delay 500 --bandwidth 1000 --rounds 3

bench-breakdown: stock guest kernel ## where the time of one fault goes
	@$(BENCH)/breakdown.py $(BENCH_OPTIONS)
	@$(if $(QUICK),,$(BENCH)/breakdown.py --cpus 1 --name breakdown-1)

bench-model: stock guest kernel ## a model of the queues for many vCPUs, and its error
	@$(BENCH)/model.py $(BENCH_OPTIONS)

bench-guest-time: stock guest kernel ## what migrations do to a guest's clocks: stock QEMU, the fork; 100 in a row
	@$(BENCH)/guest_time.py $(BENCH_OPTIONS)

bench-snapshot: stock guest kernel ## background snapshots of stock QEMU and of the fork, on this host and in the lab
	@$(BENCH)/snapshot.py $(BENCH_OPTIONS)
	@$(if $(QUICK),,$(BENCH)/snapshot.py --lab --rounds 1)

bench-async: stock guest kernel ## what a Linux guest does during post-copy: async page faults from exits, exits, none, stock
	@$(BENCH)/async.py $(BENCH_OPTIONS)

bench-counter: aarch64 ## what it costs an arm64 guest to read its counters, in the lab
	@build/venv/bin/python tests/bench/counter.py

SOAK ?= 200
SEED ?= 1
soak: guest kernel ## SOAK=200 random migrations in the lab, from SEED=1 on, killed, cut, paused and recovered at each phase
	@build/venv/bin/python tests/postcopy/soak.py --number $(SOAK) --seed $(SEED)

FUZZ ?= 60
fuzz: build      ## FUZZ=60 seconds of migration streams that lie, to both sides, from SEED=N or a random one
	@scripts/setup fuzz
	@scripts/ninja build/fuzz qemu-fuzz-x86_64
	@build/venv/bin/python tests/fuzz/fuzz.py --seconds $(FUZZ) $(if $(filter file,$(origin SEED)),,--seed $(SEED))

lab-shell: guest kernel ## a shell in the lab's first-level machine
	@tests/lab/lab --arch $(ARCH) shell

branch:          ## the series as a git branch, one commit per theme: build/branch
	@scripts/setup fork
	@scripts/series branch

help:            ## this text
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /  \1\t/p' Makefile | expand -t 22
