/*
 * A client of libblkio at a vhost-user-blk socket: blkio-client SOCKET QUEUES event|poll
 *
 * Writes every block of the disk's first 4 MiB, each through the queue whose turn it is and 64 at a time through each; flushes; reads
 * them back through other queues and compares; discards some and writes zeroes over others, and reads all once more. "event" waits at the
 * queues' completion descriptors, "poll" has queues that the library polls. Ends with a word on standard output, or at the first
 * thing that is not as it should be with a message and status 1.
 */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <blkio.h>

enum {
    BLOCK = 4096,
    BLOCKS = 1024,
    DEPTH = 64,
    MAX_QUEUES = 16,
    /* What is discarded, and then what is zeroed, in pieces of so many blocks. */
    DISCARD = 256,
    ZEROES = 512,
    KEPT = 768,
    PIECE = 16,
    /* A server that says nothing for so long is not going to. */
    PATIENCE_MS = 240 * 1000,
};

enum operation { WRITE, READ, DISCARD_PIECE, ZERO_PIECE, FLUSH };

static struct queue {
    struct blkioq *blkioq;
    int in_flight;
} queues[MAX_QUEUES];
static int queue_count;
static int polled;
static unsigned char *memory;

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

/* Eight bytes of the block with this number, which differ from those of every other place. */
static uint64_t word(int block, int index)
{
    return ((uint64_t)(block + 1) << 32) | (uint32_t)index;
}

/* Takes what has come back; at least one request does. */
static void reap(struct queue *queue)
{
    struct blkio_completion completions[DEPTH];
    int found;

    for (;;) {
        struct timespec patience = {.tv_sec = PATIENCE_MS / 1000};
        found = blkioq_do_io(queue->blkioq, completions, polled, DEPTH, polled ? &patience : NULL);
        check(found, "blkioq_do_io");
        if (found > 0)
            break;
        struct pollfd bell = {.fd = blkioq_get_completion_fd(queue->blkioq), .events = POLLIN};
        uint64_t rings;
        if (poll(&bell, 1, PATIENCE_MS) != 1)
            fail("%d requests are in flight and nobody rings", queue->in_flight);
        if (read(bell.fd, &rings, sizeof(rings)) < 0 && errno != EAGAIN)
            fail("cannot read a completion descriptor: %s", strerror(errno));
    }
    for (int i = 0; i < found; i++) {
        if (completions[i].ret != 0)
            fail("request %d failed: %s", (int)(intptr_t)completions[i].user_data, strerror(-completions[i].ret));
    }
    queue->in_flight -= found;
}

static void submit(struct queue *queue, enum operation operation, int block)
{
    void *name = (void *)(intptr_t)block;
    void *buffer = memory + (size_t)block * BLOCK;
    uint64_t start = (uint64_t)block * BLOCK;

    if (queue->in_flight == DEPTH) {
        /* The others have something to do meanwhile. */
        for (int i = 0; i < queue_count; i++)
            check(blkioq_do_io(queues[i].blkioq, NULL, 0, 0, NULL), "blkioq_do_io");
        reap(queue);
    }
    switch (operation) {
    case WRITE:
        blkioq_write(queue->blkioq, start, buffer, BLOCK, name, 0);
        break;
    case READ:
        blkioq_read(queue->blkioq, start, buffer, BLOCK, name, 0);
        break;
    case DISCARD_PIECE:
        blkioq_discard(queue->blkioq, start, PIECE * BLOCK, name, 0);
        break;
    case ZERO_PIECE:
        blkioq_write_zeroes(queue->blkioq, start, PIECE * BLOCK, name, 0);
        break;
    case FLUSH:
        blkioq_flush(queue->blkioq, name, 0);
        break;
    }
    queue->in_flight++;
}

/* Does it for every `step` blocks of a range; the first goes to the queue `first`, the next to the next. */
static void all(enum operation operation, int begin, int end, int step, int first)
{
    for (int block = begin; block < end; block += step)
        submit(&queues[(first + (block - begin) / step) % queue_count], operation, block);
    for (int i = 0; i < queue_count; i++) {
        while (queues[i].in_flight > 0)
            reap(&queues[i]);
    }
}

static void fill(void)
{
    uint64_t *words = (uint64_t *)memory;
    for (int i = 0; i < BLOCKS * BLOCK / 8; i++)
        words[i] = word(i / (BLOCK / 8), i % (BLOCK / 8));
}

/* Reads everything and compares. Blocks from `begin` to `end` should be empty. */
static void verify(int first, int begin, int end)
{
    const uint64_t *words = (const uint64_t *)memory;
    memset(memory, 0x5a, (size_t)BLOCKS * BLOCK);
    all(READ, 0, BLOCKS, 1, first);
    for (int i = 0; i < BLOCKS * BLOCK / 8; i++) {
        int block = i / (BLOCK / 8);
        uint64_t expected = block >= begin && block < end ? 0 : word(block, i % (BLOCK / 8));
        if (words[i] != expected)
            fail("block %d has %#llx at %d and should have %#llx", block, (unsigned long long)words[i],
                 i % (BLOCK / 8) * 8, (unsigned long long)expected);
    }
}

int main(int count, char **arguments)
{
    struct blkio *disk;
    struct blkio_mem_region region;

    if (count != 4)
        fail("usage: %s SOCKET QUEUES event|poll", arguments[0]);
    queue_count = atoi(arguments[2]);
    polled = strcmp(arguments[3], "poll") == 0;
    if (queue_count < 1 || queue_count > MAX_QUEUES)
        fail("QUEUES is from 1 to %d", MAX_QUEUES);

    check(blkio_create("virtio-blk-vhost-user", &disk), "blkio_create");
    check(blkio_set_str(disk, "path", arguments[1]), "path");
    check(blkio_connect(disk), "blkio_connect");
    check(blkio_set_int(disk, "num-queues", polled ? 0 : queue_count), "num-queues");
    check(blkio_set_int(disk, "num-poll-queues", polled ? queue_count : 0), "num-poll-queues");
    check(blkio_start(disk), "blkio_start");
    check(blkio_alloc_mem_region(disk, &region, (size_t)BLOCKS * BLOCK), "blkio_alloc_mem_region");
    check(blkio_map_mem_region(disk, &region), "blkio_map_mem_region");
    memory = region.addr;
    for (int i = 0; i < queue_count; i++) {
        queues[i].blkioq = polled ? blkio_get_poll_queue(disk, i) : blkio_get_queue(disk, i);
        if (!queues[i].blkioq)
            fail("there is no queue %d", i);
        if (!polled)
            blkioq_set_completion_fd_enabled(queues[i].blkioq, true);
    }

    fill();
    all(WRITE, 0, BLOCKS, 1, 0);
    all(FLUSH, 0, queue_count, 1, 0);
    verify(1, 0, 0);
    all(DISCARD_PIECE, DISCARD, ZEROES, PIECE, 0);
    all(ZERO_PIECE, ZEROES, KEPT, PIECE, 0);
    all(FLUSH, 0, queue_count, 1, 0);
    verify(2, DISCARD, KEPT);

    blkio_unmap_mem_region(disk, &region);
    blkio_free_mem_region(disk, &region);
    blkio_destroy(&disk);
    puts("verified");
    return 0;
}
