/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the unit tests of pure arithmetic need of QEMU, so that they are built without it */
#ifndef QEMU_OSDEP_H
#define QEMU_OSDEP_H

#include <glib.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct Error Error;
typedef struct VMStateDescription VMStateDescription;
#define ARRAY_SIZE(x) ((int)G_N_ELEMENTS(x))

#endif
