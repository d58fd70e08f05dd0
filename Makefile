# `make demo` and `make test` each do all the set-up they need, as root or with sudo.
SHELL := /bin/bash
CARGO := scripts/cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
RINGTAP := $(TARGET)/release/ringtap
LAB = $(dir $(RINGTAP))ringtap-lab
PREFIX ?= /usr/local
DESTDIR ?=

.PHONY: help build demo check msrv deny test iotests models fuzz bench install install-tap install-lab uninstall deb

help:
	@echo "make demo       install what is missing, build, boot a guest on a served disk, compare"
	@echo "make check      format, lints, unit tests and simulations; no root, no guests"
	@echo "make msrv       whether the oldest Rust that Cargo.toml names compiles it all (by rustup)"
	@echo "make deny       licences, sources and twins of the crates linked, and advisories where their list can be fetched (cargo-deny)"
	@echo "make test       install what is missing, check format and lints, run every test; CI=1: fail on an unknown skip"
	@echo "make iotests    QEMU's own tests of image formats, with Ringtap for its tools: FORMATS=\"raw qcow2\" TESTS=\"001 002\""
	@echo "make models     only the models of what threads share: ORDERS=20000 tries so many of each"
	@echo "make fuzz       every fuzz target, guided by coverage: MINUTES=60 each, TARGETS=names for some only"
	@echo "make build      the optimised binaries: $(RINGTAP), $(LAB)"
	@echo "make bench      ratios against other servers, in about an hour"
	@echo "make install    binaries without debug symbols (those in /usr/lib/debug), manual pages, completions, unit examples, below PREFIX=$(PREFIX)"
	@echo "make uninstall  remove them"
	@echo "make deb        packages for this Debian, in $(TARGET)/deb; RINGTAP=PATH of another binary"

build:
	scripts/setup.sh build
	$(CARGO) build --release --locked -p ringtap -p ringtap-lab

demo:
	scripts/setup.sh demo
	$(CARGO) build --release --locked -p ringtap -p ringtap-lab --bins --example demo
	$(TARGET)/release/examples/demo
	$(RINGTAP) compare

# What needs no root and no guests, but Rust and qemu-utils. The simulations by their names: by `-p` they would be built with other features, and all below them.
SIMULATIONS := $(sort $(basename $(notdir $(wildcard crates/vbd/tests/*.rs) $(patsubst %/main.rs,%,$(wildcard crates/vbd/tests/*/main.rs)))))
# Longer than what a change is tried with over and over: `make test` has them.
LONG := boundaries::
# Files that are named in a list (`files!`), where `cargo fmt` does not see them.
LISTED := $(wildcard $(foreach folder,backend stage workload,crates/lab/src/$(folder)/*.rs crates/lab/src/$(folder)/*/*.rs))
FORMAT := $(CARGO) fmt --all -- --check $(LISTED)
check:
	$(FORMAT)
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) test --workspace --lib --bins $(SIMULATIONS:%=--test %) --locked -q -- $(LONG:%=--skip %)

MSRV = $(shell sed -n 's/^rust-version = "\(.*\)"$$/\1/p' Cargo.toml)
msrv:
	rustup toolchain install $(MSRV) --profile minimal --no-self-update
	rustup run $(MSRV) cargo check --workspace --all-targets --locked --target-dir $(TARGET)/msrv

deny:
	command -v cargo-deny >/dev/null || $(CARGO) install cargo-deny --version 0.20.2 --locked --root $(TARGET)/tools
	PATH=$$PATH:$(TARGET)/tools/bin $(CARGO) deny check bans licenses sources
	@export PATH=$$PATH:$(TARGET)/tools/bin; if $(CARGO) deny fetch db 2>/dev/null; \
	    then $(CARGO) deny check --disable-fetch advisories; else echo "advisories: their list on github.com is out of reach"; fi

# Packages come and are unpacked while all is compiled. Then two programs of tests at a time, for they wait for disks and guests as much
# as they compute: those that take longest first, what is left all in one. Output comes program by program.
THREADS ?= $(shell nproc)
LONGEST := end_to_end report xen rbd snapshot ublk formats images kernels upgrade units migration restart_log objects control thin cli panic qemu stores
TEST_PROGRAMS := $(sort $(basename $(notdir $(wildcard */tests/*.rs */tests/tests/*.rs crates/*/tests/*.rs) \
    $(patsubst %/main.rs,%,$(wildcard */tests/*/main.rs crates/*/tests/*/main.rs)))))
CARGO_TEST := $(CARGO) test --workspace --locked
# One that hangs ends alone, and its tests' names are seen. A test that fails is run once more, alone; the run's last lines name it.
BOUND := scripts/again.sh timeout --verbose -k 30 1800
SHOW := --show-output --test-threads $(THREADS)
test:
	scripts/setup.sh build
	$(MAKE) --no-print-directory -j 2 prepared compiled
	$(FORMAT)
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	set -o pipefail; $(MAKE) --no-print-directory -j 2 --output-sync programs | scripts/skips.sh tests/skips.txt
	scripts/check-docs.sh $(TARGET)/debug/ringtap

.PHONY: prepared compiled programs others examples threads
prepared:
	scripts/setup.sh test

compiled:
	$(CARGO_TEST) --no-run

programs: others models threads $(LONGEST:%=program-%) examples

others:
	$(BOUND) $(CARGO_TEST) --no-fail-fast --lib --bins $(patsubst %,--test %,$(filter-out $(LONGEST),$(TEST_PROGRAMS))) -- $(SHOW)

program-%:
	$(BOUND) $(CARGO_TEST) --test $* -- $(SHOW)

examples:
	$(CARGO_TEST) --doc -- --show-output

threads:
	RINGTAP_IO=threads $(BOUND) $(CARGO_TEST) --no-fail-fast --test vhost_user --test fuse --test restart_log --test idle --test nbd --test stores -- $(SHOW) --skip on_xfs --skip on_btrfs --skip on_tmpfs --skip silent

FORMATS ?=
iotests:
	scripts/setup.sh test
	$(CARGO) build --locked -p ringtap
	nice -n 19 scripts/iotests.sh $(FORMATS)

# With `shuttle` in the place of std's atomics and locks, so these are builds of their own: nothing else is run
# by them. docs/testing.md.
MODELS := -p ringtap-image -p ringtap-vbd --features shuttle --locked
SHOWN := --test-threads 1 --show-output
models:
	scripts/setup.sh build
	$(CARGO) clippy $(MODELS) --all-targets -- -D warnings
	RINGTAP_ORDERS=$(ORDERS) $(CARGO) test $(MODELS) --lib -- models $(SHOWN)
	RINGTAP_ORDERS=$(ORDERS) $(CARGO) test $(MODELS) --test models -- $(SHOWN)

MINUTES ?= 60
TARGETS ?=
fuzz:
	scripts/setup.sh fuzz
	nice -n 19 scripts/fuzz.sh $(MINUTES) $(TARGETS)

bench:
	scripts/setup.sh bench
	$(CARGO) build --release --locked -p ringtap -p ringtap-bench
	$(TARGET)/release/vhost_user
	$(TARGET)/release/formats
	$(TARGET)/release/luks
	$(TARGET)/release/nbd
	$(TARGET)/release/tls
	$(TARGET)/release/convert
	$(TARGET)/release/ublk
	$(TARGET)/release/idle
	$(TARGET)/release/many
	$(TARGET)/release/remote

# Built where it is missing only, so that `sudo make install` needs no Rust.
$(RINGTAP) $(LAB):
	$(MAKE) build

# installed BINARY: stripped, its debug symbols beside, where debuggers look for them.
DEBUG = $(DESTDIR)/usr/lib/debug$(PREFIX)/bin
define installed
	install -D -m 755 $(1) $(DESTDIR)$(PREFIX)/bin/$(notdir $(1))
	install -d $(DEBUG)
	objcopy --only-keep-debug $(1) $(DEBUG)/$(notdir $(1)).debug
	objcopy --strip-unneeded --add-gnu-debuglink=$(DEBUG)/$(notdir $(1)).debug $(DESTDIR)$(PREFIX)/bin/$(notdir $(1))
endef

install: install-tap install-lab

install-lab: $(LAB)
	$(call installed,$(LAB))
	$(LAB) man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	install -d $(DESTDIR)$(PREFIX)/share/zsh/site-functions
	install -d $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(LAB) completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/ringtap-lab
	$(LAB) completions zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_ringtap-lab
	$(LAB) completions fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/ringtap-lab.fish
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/share/doc/ringtap-lab contrib/lab/*
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/ringtap-lab/systemd contrib/systemd/ringtap-compare.*

install-tap: $(RINGTAP)
	$(call installed,$(RINGTAP))
	$(RINGTAP) man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	install -d $(DESTDIR)$(PREFIX)/share/zsh/site-functions
	install -d $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(RINGTAP) completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/ringtap
	$(RINGTAP) completions zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_ringtap
	$(RINGTAP) completions fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/ringtap.fish
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/ringtap/systemd $(filter-out %.timer %compare.service,$(wildcard contrib/systemd/*))
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/share/doc/ringtap/xen contrib/xen/*
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/ringtap/grafana contrib/grafana/*
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/share/ringtap/bpftrace contrib/bpftrace/*
	sed -i 's|/usr/bin/ringtap:|$(PREFIX)/bin/ringtap:|' $(DESTDIR)$(PREFIX)/share/ringtap/bpftrace/*

deb: $(RINGTAP)
	scripts/setup.sh deb
	scripts/deb.sh $(RINGTAP) $(TARGET)/deb
	@ls -l $(TARGET)/deb

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/ringtap $(DESTDIR)$(PREFIX)/bin/ringtap-lab $(DEBUG)/ringtap.debug $(DEBUG)/ringtap-lab.debug
	rm -f $(DESTDIR)$(PREFIX)/share/man/man1/ringtap.1 $(DESTDIR)$(PREFIX)/share/man/man1/ringtap-*.1
	rm -f $(DESTDIR)$(PREFIX)/share/bash-completion/completions/{ringtap,ringtap-lab}
	rm -f $(DESTDIR)$(PREFIX)/share/zsh/site-functions/{_ringtap,_ringtap-lab}
	rm -f $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/{ringtap,ringtap-lab}.fish
	rm -rf $(DESTDIR)$(PREFIX)/share/doc/{ringtap,ringtap-lab} $(DESTDIR)$(PREFIX)/share/ringtap
