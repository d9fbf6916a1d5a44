# SPDX-License-Identifier: GPL-2.0-or-later
"""The lab, and the code by which tests, benches and the demo drive QEMU.

    paths       paths in the checkout
    lab         the first-level machine; initramfs: its files; kvm_interface: the KVM interface that it offers;
                arches: marks of its tests; command: tests/lab/lab
    backends    kinds of memory and of connections
    pair        two QEMUs and a migration between them; proxy: the connection between them; failures: killed
                processes and cut connections; missing_at_load: pages that devices miss while they are loaded
    network     a link with a delay between the two; tls: keys; fetch_proxy: a proxy that parses frames
    other_qemu  other QEMUs; libvirt: virsh in the lab
    limits      where the threads of QEMUs sleep when a test hangs
    snapshot    a QEMU of which background snapshots are taken
    host        this machine in place of the lab
    guest       the payload; linux_guest, linux_pair: Linux in its place; vhost_user: a disk of it
                that another process serves
    clocks      a migration's effect on a guest's clocks; arm_clocks: on those of arm64
    qtest       QEMU's test protocol; sanitizer: reports of sanitizers
    cli         common code of programs; text: patterns that must be found
"""
