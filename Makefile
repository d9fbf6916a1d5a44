# SPDX-License-Identifier: GPL-2.0-or-later
.PHONY: all build stock help
all: build

build:           ## build the fork: build/fork/qemu-system-x86_64
	@scripts/setup fork
	@scripts/ninja build/fork

stock:           ## build the same QEMU without our series: build/stock
	@scripts/setup stock
	@scripts/ninja build/stock.d/fork
