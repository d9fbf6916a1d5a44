/* SPDX-License-Identifier: GPL-2.0-or-later */
/* For prototypes of functions that are not compiled here */
typedef int RunState;
