/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The guest's reports and parameters. */
#include <stdarg.h>
#include "touch.h"

#define FW_CFG_RAM_SIZE     0x03
#define FW_CFG_NB_CPUS      0x05
#define FW_CFG_FILE_DIR     0x19
#define PARAMETER_FILE      "opt/touch"

struct parameters par = { .zero_percent = 12 };
static const struct {
    const char *key;
    uint64_t *value;
} numbers[] = {
    { "pattern", &par.pattern },
    { "seed", &par.seed },
    { "ram", &par.ram_mb },
    { "mem", &par.mem_mb },
    { "zero", &par.zero_percent },
    { "passes", &par.passes },
    { "vmclock", &par.vmclock },
    { "adjust", &par.adjust },
    { "deadline", &par.deadline_ms },
    { "async", &par.async },
    { "time", &par.time },
    { "late_rom", &par.late_rom },
};

static char line[512];
static size_t line_length;

static void put(char c)
{
    if (line_length < sizeof(line)) {
        line[line_length++] = c;
    }
}

static void put_string(const char *s)
{
    while (*s) {
        put(*s++);
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

void report(const char *format, ...)
{
    static bool busy;       /* protects @line and the console */
    va_list args;

    pause_while(__atomic_exchange_n(&busy, true, __ATOMIC_ACQUIRE));
    line_length = 0;
    put_string("{\"event\": ");
    va_start(args, format);
    for (; *format; format++) {
        if (*format == '\'') {
            put('"');
        } else if (*format != '%') {
            put(*format);
        } else if (*++format == 's') {
            put_string(va_arg(args, const char *));
        } else if (*format == 'u') {
            put_number(va_arg(args, uint64_t), 10);
        } else {
            put_string("0x");
            put_number(va_arg(args, uint64_t), 16);
        }
    }
    va_end(args);
    put_string("}\n");
    write_console(line, line_length);
    __atomic_store_n(&busy, false, __ATOMIC_RELEASE);
}

_Noreturn void die(const char *message)
{
    report("'error', 'message': '%s'", message);
    halt();
}

bool equal(const char *a, const char *b)
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
    fw_cfg_read(&files, sizeof(files));
    for (files = __builtin_bswap32(files); files; files--) {
        fw_cfg_read(&file, sizeof(file));
        if (equal(file.name, name)) {
            *size = __builtin_bswap32(file.size);
            return __builtin_bswap16(file.select);
        }
    }
    return 0;
}

static uint64_t number(const char *s)
{
    uint64_t value = 0;

    do {
        if (*s < '0' || *s > '9') {
            die("parameter is not a decimal number");
        }
        value = value * 10 + (*s - '0');
    } while (*++s);
    return value;
}

static void set_parameter(const char *key, const char *value)
{
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
        if (equal(key, numbers[i].key)) {
            *numbers[i].value = number(value);
            return;
        }
    }
    die("unknown parameter");
}

/* Ends a word at the character @c; returns what follows it. */
static char *cut(char *s, char c)
{
    while (*s && *s != c) {
        s++;
    }
    if (*s) {
        *s++ = 0;
    }
    return s;
}

/* "key=value key=value ..."; the file may be absent. */
void read_parameters(void)
{
    static char text[256];
    char *s = text;
    uint64_t ram_bytes;
    uint32_t size = 0;
    uint16_t file;

    fw_cfg_select(FW_CFG_RAM_SIZE);     /* zeros on a machine without it */
    fw_cfg_read(&ram_bytes, sizeof(ram_bytes));
    par.ram_mb = ram_bytes >> 20;
    fw_cfg_select(FW_CFG_NB_CPUS);
    fw_cfg_read(&par.cpus, sizeof(uint16_t));
    if (par.cpus > MAX_CPUS) {
        die("too many processors");
    }

    file = fw_cfg_file(PARAMETER_FILE, &size);
    if (size >= sizeof(text)) {
        die("parameters too long");
    }
    if (file) {
        fw_cfg_select(file);
        fw_cfg_read(text, size);
    }
    while (*s) {
        char *key = s, *value = cut(key, '=');

        s = cut(value, ' ');
        set_parameter(key, value);
    }
}
