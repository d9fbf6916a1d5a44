# SPDX-License-Identifier: GPL-2.0-or-later
"""The lab, and what tests, benches and the demo drive QEMU with.

    paths       where things lie in the checkout
    lab         the first-level machine; initramfs: its files; kvm_interface: the interface that its KVM offers;
                arches: marks of its tests; command: tests/lab/lab
    backends    kinds of memory and of connections
    pair        two QEMUs and a migration between them; proxy: the connection between them; failures: killed
                processes and cut connections; missing_at_load: pages that devices miss while they are loaded
    network     a link with a delay between the two; tls: keys; fetch_proxy: a proxy that knows frames
    compatibility  which QEMUs migrate to each other; other_qemu: other QEMUs; libvirt: virsh in the lab
    limits      where the threads of QEMUs stand when a test hangs
    snapshot    a QEMU of which background snapshots are taken
    threads     where the threads of a process sleep; host: this machine in place of the lab
    guest       the payload; linux_guest, linux_pair, async_guest: Linux in its place
    clocks      what a migration does to a guest's clocks; arm_clocks: to those of arm64
    qtest       QEMU's test protocol; sanitizer: reports of sanitizers
    cli         what programs have in common; text: patterns that must be found
"""
