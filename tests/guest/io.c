/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The guest's reports and parameters. */
#include <stdarg.h>
#include "touch.h"

#define FW_CFG_RAM_SIZE     0x03
#define FW_CFG_NB_CPUS      0x05
#define FW_CFG_FILE_DIR     0x19
#define PARAMETER_FILE      "opt/touch"

struct parameters par = { .zero_percent = 12 };
const char *const pattern_names[PATTERNS] = {
    "disjoint", "shared", "samehuge", "zerowrite", "smm", "sequential",
    "strided", "hot",
};

static char line[512];
static size_t line_length;

static void put(char c)
{
    if (line_length < sizeof(line)) {
        line[line_length++] = c;
    }
}

static void put_number(uint64_t value, unsigned base)
{
    char digits[20];
    int n = 0;

    do {
        digits[n++] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value);
    while (n) {
        put(digits[--n]);
    }
}

void print(const char *format, ...)
{
    static bool busy;       /* protects @line and the console */
    va_list args;

    while (__atomic_exchange_n(&busy, true, __ATOMIC_ACQUIRE)) {
        pause();
    }
    va_start(args, format);
    for (line_length = 0; *format; format++) {
        if (*format != '%') {
            put(*format);
            continue;
        }
        switch (*++format) {
        case 's':
            for (const char *s = va_arg(args, const char *); *s; s++) {
                put(*s);
            }
            break;
        case 'u':
            put_number(va_arg(args, uint64_t), 10);
            break;
        case 'x':
            put('0');
            put('x');
            put_number(va_arg(args, uint64_t), 16);
            break;
        }
    }
    va_end(args);
    write_console(line, line_length);
    __atomic_store_n(&busy, false, __ATOMIC_RELEASE);
}

_Noreturn void die(const char *message)
{
    print("{\"event\": \"error\", \"message\": \"%s\"}\n", message);
    halt();
}

static uint32_t fw_cfg_be32(void)
{
    uint32_t value;
    fw_cfg_read(&value, sizeof(value));
    return __builtin_bswap32(value);
}

static bool equal(const char *a, const char *b)
{
    while (*a && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* Returns the key of a file, and its size; 0 if there is none. */
uint16_t fw_cfg_file(const char *name, uint32_t *size)
{
    struct { uint32_t size; uint16_t select, reserved; char name[56]; } file;
    uint32_t files;

    fw_cfg_select(FW_CFG_FILE_DIR);
    for (files = fw_cfg_be32(); files; files--) {
        fw_cfg_read(&file, sizeof(file));
        if (equal(file.name, name)) {
            *size = __builtin_bswap32(file.size);
            return __builtin_bswap16(file.select);
        }
    }
    return 0;
}

/* Reads the parameter file as a string; it may be absent. */
static void read_parameter_file(char *text, size_t size)
{
    uint32_t length = 0;
    uint16_t key = fw_cfg_file(PARAMETER_FILE, &length);

    if (length >= size) {
        die("parameters too long");
    }
    if (key) {
        fw_cfg_select(key);
        fw_cfg_read(text, length);
    }
    text[length] = 0;
}

static uint64_t number(const char *s)
{
    uint64_t value = 0;

    if (!*s) {
        die("parameter without a number");
    }
    for (; *s; s++) {
        if (*s < '0' || *s > '9') {
            die("parameter is not a decimal number");
        }
        value = value * 10 + (*s - '0');
    }
    return value;
}

static void set_parameter(const char *key, const char *value)
{
    if (equal(key, "pattern")) {
        for (int i = 0; i < PATTERNS; i++) {
            if (equal(value, pattern_names[i])) {
                par.pattern = i;
                return;
            }
        }
        die("unknown pattern");
    } else if (equal(key, "seed")) {
        par.seed = number(value);
    } else if (equal(key, "ram")) {
        par.ram_bytes = number(value) << 20;
    } else if (equal(key, "mem")) {
        par.mem_mb = number(value);
    } else if (equal(key, "zero")) {
        par.zero_percent = number(value);
    } else if (equal(key, "passes")) {
        par.passes = number(value);
    } else if (equal(key, "vmclock")) {
        par.vmclock = number(value);
    } else if (equal(key, "adjust")) {
        par.adjust = number(value);
    } else if (equal(key, "deadline")) {
        par.deadline_ms = number(value);
    } else if (equal(key, "async")) {
        par.async = number(value);
    } else if (equal(key, "time")) {
        par.time = number(value);
    } else if (equal(key, "late_rom")) {
        par.late_rom = number(value);
    } else if (equal(key, "rest")) {
        par.rest_ms = number(value);
    } else {
        die("unknown parameter");
    }
}

/* "key=value key=value ..." */
void read_parameters(void)
{
    char text[256], *s = text;

    fw_cfg_select(FW_CFG_RAM_SIZE);     /* zeros on a machine without it */
    fw_cfg_read(&par.ram_bytes, sizeof(par.ram_bytes));
    fw_cfg_select(FW_CFG_NB_CPUS);
    fw_cfg_read(&par.cpus, sizeof(uint16_t));
    if (par.cpus > MAX_CPUS) {
        die("too many processors");
    }

    read_parameter_file(text, sizeof(text));
    while (*s) {
        char *key = s, *value;
        bool last;

        while (*s && *s != '=') {
            s++;
        }
        if (!*s) {
            die("parameter without a value");
        }
        *s++ = 0;
        value = s;
        while (*s && *s != ' ') {
            s++;
        }
        last = !*s;
        *s = 0;
        set_parameter(key, value);
        s += !last;
    }
}
