/*
 * Postcopy: send the rings of virtio queues first
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "hw/virtio/virtio.h"
#include "migration/postcopy/first.h"

static int virtio_first_pages_of(Object *obj, void *opaque)
{
    VirtIODevice *vdev = (VirtIODevice *)
        object_dynamic_cast(obj, TYPE_VIRTIO_DEVICE);
    PostcopyFirstPages *to = opaque;

    if (!vdev || !qdev_is_realized(DEVICE(vdev))) {
        return 0;
    }
    for (int n = 0; n < VIRTIO_QUEUE_MAX; n++) {
        unsigned num = virtio_queue_get_num(vdev, n);
        hwaddr avail, used, next;

        if (!num || !virtio_queue_enabled(vdev, n)) {
            continue;
        }
        avail = virtio_queue_get_avail_addr(vdev, n);
        used = virtio_queue_get_used_addr(vdev, n);
        /* In a packed ring, bit 15 is the wrap counter, no part of the index */
        next = (virtio_queue_get_last_avail_idx(vdev, n) & 0x7fff) % num;
        /* Loading a queue compares its state with the heads of these rings */
        postcopy_first_add(to, vdev->dma_as, avail, sizeof(uint32_t));
        postcopy_first_add(to, vdev->dma_as, used, sizeof(uint32_t));
        postcopy_first_add(to, vdev->dma_as,
                           virtio_queue_get_desc_addr(vdev, n) + next * 16, 16);
        if (!virtio_vdev_has_feature(vdev, VIRTIO_F_RING_PACKED)) {
            postcopy_first_add(to, vdev->dma_as, avail + 4 + next * 2, 2);
            postcopy_first_add(to, vdev->dma_as, used + 4 + next * 8, 8);
        }
    }
    return 0;
}

static void virtio_first_pages(PostcopyFirstPages *to)
{
    object_child_foreach_recursive(object_get_root(), virtio_first_pages_of,
                                   to);
}

static void virtio_first_register(void)
{
    postcopy_first_devices(virtio_first_pages);
}

type_init(virtio_first_register)
