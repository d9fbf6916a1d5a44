# SPDX-License-Identifier: GPL-2.0-or-later
"""The lab, and what tests, benches and the demo drive QEMU with.

    paths       where things lie in the checkout
    lab         the first-level machine; initramfs: what is in it; interface: which one its KVM offers;
                arches: marks of its tests; command: tests/lab/lab
    pair        two QEMUs and a migration between them; wire: what lies between; faults: what befalls it
    network     a link with a delay between the two; tls: keys; fetch_wire: a wire that knows frames
    compatibility  which QEMUs migrate to each other; peer: other QEMUs; libvirt: virsh in the lab
    snapshot    a QEMU of which background snapshots are taken
    guest       the payload; linux_guest, linux_pair: Linux in its place
    clocks      what a migration does to a guest's clocks; counters: to those of arm64
    qtest       QEMU's test protocol; sanitizer: what sanitizers report
    program     what programs have in common; text: what is found in text
"""
