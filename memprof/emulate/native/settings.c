/* The settings, all from the environment. memprof/emulate/launch.py writes them; docs/emulate.md has the table. */
#include "emulator.h"
#include <strings.h>
#include <time.h>

struct settings settings;

static size_t parse_size(const char *text, size_t fallback) {
    static const struct { const char *unit; double factor; } units[] = {
        {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}};
    if (!text || !*text) return fallback;
    char *unit;
    double value = strtod(text, &unit);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (!strcasecmp(unit, units[i].unit)) value *= units[i].factor;
    return (size_t)value;
}

static int parse_int(const char *name, int fallback) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : fallback;
}

static int is_on(const char *name) {
    const char *text = getenv(name);
    return text && *text && strcmp(text, "0");
}

/* CUDA_VISIBLE_DEVICES chooses and orders the cards; the first entry that names none ends the list, as in the driver. */
static void see_devices(void) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) {
        settings.devices = settings.cards;
        for (int i = 0; i < settings.cards; i++) settings.card_of[i] = i;
        return;
    }
    while (*list && settings.devices < MAX_DEVICES) {
        char *end;
        long card = strtol(list, &end, 10);
        if (end == list || card < 0 || card >= settings.cards) return;
        settings.card_of[settings.devices++] = (int)card;
        if (*end != ',') return;
        list = end + 1;
    }
}

static void report_at_exit(void) {
    for (int i = 0; i < settings.devices; i++)
        fprintf(stderr, "memprof emulator: device %d used %zu highest %zu of %zu\n", i, used[i], highest[i], settings.memory);
    report_launches();
}

static void read_settings(void) {
    const char *text;
    settings.cards = parse_int("MEMPROF_EMULATE_DEVICES", 1);
    if (settings.cards > MAX_DEVICES) settings.cards = MAX_DEVICES;
    see_devices();
    settings.memory = parse_size(getenv("MEMPROF_EMULATE_MEMORY"), (size_t)80 << 30);
    settings.context = parse_size(getenv("MEMPROF_EMULATE_CONTEXT"), (size_t)512 << 20);
    settings.copy_max = parse_size(getenv("MEMPROF_EMULATE_COPY_MAX"), SIZE_MAX);
    settings.event_delay_ns = (uint64_t)parse_int("MEMPROF_EMULATE_EVENT_DELAY_US", 0) * 1000;
    settings.major = 9;
    if ((text = getenv("MEMPROF_EMULATE_CAPABILITY"))) sscanf(text, "%d.%d", &settings.major, &settings.minor);
    settings.sms = parse_int("MEMPROF_EMULATE_SMS", 132);
    text = getenv("MEMPROF_EMULATE_NAME");
    snprintf(settings.name, sizeof settings.name, "%s", text ? text : "H100 (emulated)");
    settings.wants_values = is_on("MEMPROF_EMULATE_VALUES");
    settings.trace = is_on("MEMPROF_EMULATE_TRACE");
    if (settings.trace) atexit(report_at_exit);
}

void ready(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_settings);
}

void note_stub(const char *name) {
    ready();
    if (settings.trace) fprintf(stderr, "memprof emulator: stub %s\n", name);
}

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
