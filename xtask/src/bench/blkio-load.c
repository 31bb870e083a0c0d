/*
 * Load by libblkio on vhost-user-blk sockets, in turn: blkio-load QUEUES DEPTH WINDOW_MS WINDOWS SOCKET...
 *
 * Reads 4 KiB at random places, DEPTH at a time through each of so many queues, which it polls. Each socket has a window, then the next;
 * between windows is a pause in which a server that has nothing to do goes to sleep. For each round of windows it prints the
 * nanoseconds of an I/O at each socket.
 */

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <blkio.h>

enum { BLOCK = 4096, MAX_SOCKETS = 8, MAX_QUEUES = 16, MAX_DEPTH = 256, PAUSE_NS = 1000 * 1000 };

struct disk {
    struct blkio *blkio;
    struct blkioq *queues[MAX_QUEUES];
    unsigned char *memory;
    uint64_t blocks;
};

static int queue_count, depth;

static void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

static void check(int result, const char *what)
{
    if (result < 0)
        fail("%s: %s: %s", what, strerror(-result), blkio_get_error_msg());
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void open_disk(struct disk *disk, const char *path)
{
    struct blkio_mem_region region;
    size_t bytes = (size_t)queue_count * depth * BLOCK;

    check(blkio_create("virtio-blk-vhost-user", &disk->blkio), "blkio_create");
    check(blkio_set_str(disk->blkio, "path", path), "path");
    check(blkio_connect(disk->blkio), "blkio_connect");
    check(blkio_get_uint64(disk->blkio, "capacity", &disk->blocks), "capacity");
    disk->blocks /= BLOCK;
    check(blkio_set_int(disk->blkio, "num-queues", 0), "num-queues");
    check(blkio_set_int(disk->blkio, "num-poll-queues", queue_count), "num-poll-queues");
    check(blkio_start(disk->blkio), "blkio_start");
    check(blkio_alloc_mem_region(disk->blkio, &region, bytes), "blkio_alloc_mem_region");
    check(blkio_map_mem_region(disk->blkio, &region), "blkio_map_mem_region");
    disk->memory = region.addr;
    memset(disk->memory, 0x5a, bytes);
    for (int i = 0; i < queue_count; i++)
        disk->queues[i] = blkio_get_poll_queue(disk->blkio, i);
}

static void submit(struct disk *disk, int queue, intptr_t slot)
{
    static uint64_t place = 0x9e3779b97f4a7c15;

    place = place * 6364136223846793005u + 1442695040888963407u;
    uint64_t block = ((place >> 32) * disk->blocks) >> 32;
    blkioq_read(disk->queues[queue], block * BLOCK, disk->memory + slot * BLOCK, BLOCK, (void *)slot, 0);
}

/* Takes what has come back, and asks for as many again, if it goes on. Returns how many that were. */
static int turn(struct disk *disk, int queue, int least, int go_on)
{
    struct blkio_completion completions[MAX_DEPTH];
    int found = blkioq_do_io(disk->queues[queue], completions, least, depth, NULL);

    check(found, "blkioq_do_io");
    for (int i = 0; i < found; i++) {
        if (completions[i].ret != 0)
            fail("a read failed: %s", strerror(-completions[i].ret));
        if (go_on)
            submit(disk, queue, (intptr_t)completions[i].user_data);
    }
    return found;
}

/* Nanoseconds of an I/O, in a window of this length. */
static double window(struct disk *disk, uint64_t window_ns)
{
    uint64_t done = 0, start = now_ns(), passed;

    for (int queue = 0; queue < queue_count; queue++) {
        for (int i = 0; i < depth; i++)
            submit(disk, queue, (intptr_t)queue * depth + i);
    }
    do {
        for (int i = 0; i < 64; i++)
            done += turn(disk, i % queue_count, queue_count == 1, 1);
        passed = now_ns() - start;
    } while (passed < window_ns);
    for (int queue = 0; queue < queue_count; queue++) {
        for (int left = depth; left > 0;)
            left -= turn(disk, queue, 1, 0);
    }
    return (double)passed / (done ? done : 1);
}

int main(int count, char **arguments)
{
    static struct disk disks[MAX_SOCKETS];
    int sockets = count - 5;

    if (sockets < 1 || sockets > MAX_SOCKETS)
        fail("usage: %s QUEUES DEPTH WINDOW_MS WINDOWS SOCKET...", arguments[0]);
    queue_count = atoi(arguments[1]);
    depth = atoi(arguments[2]);
    uint64_t window_ns = strtoull(arguments[3], NULL, 10) * 1000000;
    if (queue_count < 1 || queue_count > MAX_QUEUES || depth < 1 || depth > MAX_DEPTH)
        fail("QUEUES is up to %d and DEPTH up to %d", MAX_QUEUES, MAX_DEPTH);
    for (int i = 0; i < sockets; i++)
        open_disk(&disks[i], arguments[5 + i]);
    for (int left = atoi(arguments[4]); left > 0; left--) {
        for (int i = 0; i < sockets; i++) {
            struct timespec pause = {.tv_nsec = PAUSE_NS};
            nanosleep(&pause, NULL);
            printf("%s%.3f", i ? " " : "", window(&disks[i], window_ns));
        }
        putchar('\n');
    }
    for (int i = 0; i < sockets; i++)
        blkio_destroy(&disks[i].blkio);
    return 0;
}
