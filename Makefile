# SPDX-License-Identifier: GPL-2.0-or-later
.DEFAULT_GOAL := build
# While one target configures or unpacks, on one processor, another one compiles.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j2
endif
.PHONY: all build stock inject tests guest kernel kernel-deb aarch64 tsan check check-slow demo demo-restore soak fuzz bench lab-shell branch install deb help

# Of the hosts that QEMU is for: with ARCH=aarch64, build, stock, inject, tests, guest, kernel, demo,
# bench-async and lab-shell are for arm64, in build/*-aarch64.
ARCH ?= x86_64
ifeq ($(ARCH),aarch64)
S = -aarch64
ifneq ($(filter install deb,$(MAKECMDGOALS)),)
$(error install and deb are for this machine's QEMU, not for ARCH=$(ARCH))
endif
else ifneq ($(ARCH),x86_64)
$(error ARCH is $(ARCH): there are x86_64 and aarch64)
endif

# The lab's Linux: 6.12 or 7.3
LINUX ?= 6.12
export LINUX
# By which its KVM exits for missing memory: exit_on_missing or userfault
INTERFACE ?= exit_on_missing
ifeq ($(filter $(INTERFACE),exit_on_missing userfault),)
$(error INTERFACE is $(INTERFACE): there are exit_on_missing and userfault)
endif
export INTERFACE

# What the tests and the demo run; "scripts/ninja build/fork" builds all that QEMU has.
FORK = qemu-system-$(ARCH) $(addprefix tests/qtest/,migration-test postcopy-fault-exits-test device-introspect-test \
	qmp-cmd-test qom-test test-hmp)
ifeq ($(ARCH),x86_64)
FORK += $(UNIT) contrib/vhost-user-blk/vhost-user-blk
endif
UNIT = $(patsubst %.c,%,$(wildcard tests/unit/*.c))
MESON_TEST = build/venv/bin/meson test -C build/tests --no-rebuild
# tests/meson.build has the list. pytest's own summary is the last line.
TIER = @rm -f build/tests/meson-logs/$(1).txt; $(MESON_TEST) --suite $(1) --logbase $(1); status=$$?; \
	grep -a '^=.* in [0-9.]*s' build/tests/meson-logs/$(1).txt | tail -n 1; exit $$status
# Of what is run: paths, or an expression as for pytest's -k
export TESTS

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

tests:           ## build what needs no QEMU: guests, the lab's programs, the raw KVM bench: build/tests
	@scripts/setup tests $(ARCH)
	@scripts/ninja build/tests$(S)

guest: build tests ## build that, and the Linux guest
	@build/venv/bin/python tests/lab/linux_guest.py $(ARCH)

kernel:          ## build the lab's Linux, once for all clones; LINUX=7.3: the newer one, as for demo, check, lab-shell; those also have INTERFACE=userfault
	@scripts/deps lab kernel $(S:-%=%)
	@tests/lab/kernel/build $(ARCH) >/dev/null

kernel-deb:      ## Debian packages of LINUX=6.12 or 7.3 with the KVM patches, for hosts: build/kernel-deb; CONFIG=/boot/config-...
	@tests/lab/kernel/build --deb "$(CONFIG)"

# make check does without arm64's stock QEMU.
STOCK = stock
aarch64:         ## build all that the arm64 lab needs
	@$(MAKE) -s ARCH=aarch64 $(STOCK) inject guest kernel

tsan: build      ## build the unit tests with ThreadSanitizer: build/tsan
	@scripts/setup tsan
	@scripts/ninja build/tsan $(UNIT)

check-quick: tests tsan ## style, series, docs, unit tests; under two minutes
	$(call TIER,quick)

check: STOCK =
check: stock inject guest kernel aarch64 ## all tests that are not slow; of this and the others, TESTS=tests/clock or TESTS="cut and not tls"
	$(call TIER,check)

check-slow: check-all
check-%: stock inject tsan guest kernel aarch64 ## all tests: check-all; or those of a topic: check-postcopy, -fetch, -async, -clock, -snapshot, -sdei, -integration, -series, -harness
	$(call TIER,$*)

demo: guest kernel $(if $(S),,stock) ## migrate a busy guest post-copy in the lab, by QEMU 10.0 and by this branch
	@build/venv/bin/python tests/demo/demo.py --arch $(ARCH)

demo-restore: stock guest build ## resume a Linux guest from a file, by QEMU 10.0 and by this branch
	@build/venv/bin/python -m tests.demo.restore

BENCH = $(MESON_TEST) --logbase bench --benchmark $(if $(QUICK),--test-args=--quick)
bench: stock guest kernel $(if $(QUICK),,aarch64) ## all benches, then build/reports/report.md; QUICK=1: the short ones, in five minutes
	@rm -f build/reports/*.md
	@$(BENCH) $(if $(QUICK),--suite quick); status=$$?; \
		build/venv/bin/python tests/bench/report.py && exit $$status

bench-counter: aarch64
bench-%: stock guest kernel ## one or a few of them: bench-demand-paging, -postcopy, -postcopy-more, -bitmap, -fetch, -background, -breakdown, -size, -guest-time, -snapshot, -async, -counter
	@$(BENCH) --suite $*$(and $(S),$(filter async,$*),$(S))

SOAK ?= 200
soak: guest kernel ## SOAK=200 random migrations in the lab, from SEED=N or a random one on, killed, cut, paused and recovered at each phase; FETCH=1: all by fetch channels
	@build/venv/bin/python tests/postcopy/soak.py --number $(SOAK) $(if $(SEED),--seed $(SEED)) $(if $(FETCH),--fetch)

FUZZ ?= 60
fuzz: build      ## FUZZ=60 seconds of migration streams that lie, to both sides, from SEED=N or a random one
	@scripts/setup fuzz
	@scripts/ninja build/fuzz qemu-fuzz-x86_64
	@build/venv/bin/python tests/fuzz/fuzz.py --seconds $(FUZZ) $(if $(SEED),--seed $(SEED))

MUTANTS ?= 24
check-mutants: stock inject guest kernel ## whether the tests find MUTANTS=24 faults in our code, from SEED=N or random ones; up to three hours
	@build/venv/bin/python tests/mutants/mutants.py --number $(MUTANTS) $(if $(SEED),--seed $(SEED))

lab-shell: guest kernel ## a shell in the lab's first-level machine
	@tests/lab/lab --arch $(ARCH) shell

branch:          ## the series as a git branch, one commit per patch: build/branch
	@scripts/setup fork
	@scripts/series branch

install: build   ## install the fork, at the prefix that ./configure --prefix=DIR was given, below DESTDIR
	@scripts/ninja build/fork all
	@build/fork/pyvenv/bin/meson install -C build/fork --no-rebuild --quiet --destdir "$(abspath $(DESTDIR))"

deb: build       ## a Debian package of the fork in /opt/qemu-fault-exits, beside the distribution's QEMU
	@scripts/deb

help:            ## this text
	@sed -n 's/^\([a-z0-9%-]*\):[^#]*## /  \1\t/p' Makefile | expand -t 22
