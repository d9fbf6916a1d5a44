/*
 * KVM exits on missing memory: without KVM
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "system/kvm-exit-on-missing.h"

bool kvm_exit_on_missing_available(Error **errp)
{
    error_setg(errp, "exits on missing memory need the KVM accelerator");
    return false;
}

bool kvm_exit_on_missing_enable(const KVMMissingOps *ops, Error **errp)
{
    g_assert_not_reached();
}

void kvm_exit_on_missing_disable(void)
{
}

void kvm_exit_on_missing_forget(void)
{
}

void kvm_exit_on_missing_placed(RAMBlock *rb, ram_addr_t offset, size_t size)
{
}

#ifdef CONFIG_MIGRATION_INJECT
void kvm_exit_on_missing_tcg_filled(CPUState *cpu, vaddr addr, int mmu_idx,
                                    uintptr_t addend, bool probe, uintptr_t ra)
{
}

void kvm_exit_on_missing_tcg_kick(CPUState *cpu)
{
}
#endif
