/*
 * Frames of the log region are the memory of received packets. DPDK wants an mbuf (a descriptor) for each piece of such
 * memory; here frame and mbuf are bound for ever, by number, and the pool of mbufs has no list of free ones: it asks the
 * pool of frames (take, give). So there is one owner of each frame, and one who counts its readers.
 *
 * All pools may be used by several threads at once, those of drivers included.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include <rte_dev.h>
#include <rte_errno.h>
#include <rte_mbuf_pool_ops.h>

#include "frames.h"

/* The pool that is being created: DPDK passes nothing on to its hooks. Creation is serialised by the caller. */
static struct cy_frames *being_created;

static int pool_alloc(struct rte_mempool *pool)
{
	pool->pool_data = being_created;
	return being_created == NULL ? -EINVAL : 0;
}

static void pool_free(struct rte_mempool *pool)
{
	pool->pool_data = NULL;
}

static int pool_enqueue(struct rte_mempool *pool, void *const *objects, unsigned int count)
{
	struct cy_frames *frames = pool->pool_data;

	for (unsigned int i = 0; frames->ready && i < count; i++) {
		struct cy_bound *bound = rte_mbuf_to_priv(objects[i]);

		frames->give(frames->context, bound->number);
	}
	return 0;
}

static int pool_dequeue(struct rte_mempool *pool, void **objects, unsigned int count)
{
	struct cy_frames *frames = pool->pool_data;

	if (!frames->ready)
		return -ENOBUFS;
	for (unsigned int i = 0; i < count; i++) {
		int64_t number = frames->take(frames->context);

		if (number < 0) {
			pool_enqueue(pool, objects, i);
			return -ENOBUFS;
		}
		objects[i] = frames->of[number];
	}
	return 0;
}

static unsigned int pool_count(const struct rte_mempool *pool)
{
	const struct cy_frames *frames = pool->pool_data;

	return frames->ready ? frames->count(frames->context) : pool->populated_size;
}

static const struct rte_mempool_ops frame_ops = {
	.name = "cyclone",
	.alloc = pool_alloc,
	.free = pool_free,
	.enqueue = pool_enqueue,
	.dequeue = pool_dequeue,
	.get_count = pool_count,
};

int register_frame_pools(void)
{
	return rte_mempool_register_ops(&frame_ops) < 0 ? -ENOSPC : 0;
}

static void bind_frame(struct rte_mempool *pool, void *opaque, void *object, unsigned int index)
{
	struct cy_frames *frames = opaque;
	struct rte_mbuf *mbuf = object;
	struct cy_bound *bound = rte_mbuf_to_priv(mbuf);
	uint64_t frame_bytes = rte_pktmbuf_data_room_size(pool);

	(void)index;
	bound->number = RTE_PTR_DIFF(mbuf->buf_addr, frames->base) / frame_bytes;
	frames->of[bound->number] = mbuf;
}

void cy_frames_destroy(struct cy_frames *frames)
{
	/* Nothing is out any more: the ports are closed. */
	frames->ready = false;
	rte_mempool_free(frames->lent);
	rte_mempool_free(frames->headers);
	rte_mempool_free(frames->mbufs);
	if (frames->registered)
		rte_extmem_unregister(frames->base, frames->len);
	free(frames->of);
	free(frames);
}

static int describe_frames(struct cy_frames *frames, uint32_t frame_bytes, uint32_t count)
{
	struct rte_pktmbuf_extmem memory = {
		.buf_ptr = frames->base,
		.buf_iova = (rte_iova_t)(uintptr_t)frames->base,
		.buf_len = (size_t)frame_bytes * count,
		.elt_size = frame_bytes,
	};
	char name[RTE_MEMPOOL_NAMESIZE];

	snprintf(name, sizeof(name), "cyclone%u-frames", frames->id);
	if (rte_mbuf_set_user_mempool_ops(frame_ops.name) < 0)
		return -rte_errno;
	being_created = frames;
	frames->mbufs = rte_pktmbuf_pool_create_extbuf(name, count, 0, sizeof(struct cy_bound), frame_bytes,
						       SOCKET_ID_ANY, &memory, 1);
	being_created = NULL;
	rte_mbuf_set_user_mempool_ops(RTE_MBUF_DEFAULT_MEMPOOL_OPS);
	if (frames->mbufs == NULL)
		return -rte_errno;
	rte_mempool_obj_iter(frames->mbufs, bind_frame, frames);
	return 0;
}

/* Makes the buffers for sending; before that, none is free. Zero, or negative. */
int cy_frames_send(struct cy_frames *frames, uint32_t header_bytes, uint32_t header_count)
{
	char name[RTE_MEMPOOL_NAMESIZE];

	snprintf(name, sizeof(name), "cyclone%u-headers", frames->id);
	frames->headers = rte_pktmbuf_pool_create_by_ops(name, header_count, 0, 0, header_bytes, SOCKET_ID_ANY,
							 RTE_MBUF_DEFAULT_MEMPOOL_OPS);
	if (frames->headers == NULL)
		return -rte_errno;
	snprintf(name, sizeof(name), "cyclone%u-lent", frames->id);
	frames->lent = rte_pktmbuf_pool_create_by_ops(name, CY_LENT_PER_HEADER * header_count, 0,
						      RTE_ALIGN(sizeof(struct cy_loan), RTE_MBUF_PRIV_ALIGN), 0,
						      SOCKET_ID_ANY, RTE_MBUF_DEFAULT_MEMPOOL_OPS);
	return frames->lent == NULL ? -rte_errno : 0;
}

/* Makes a pool of mbufs over `count` frames that begin at `base`. NULL and a positive `error` when it fails. */
struct cy_frames *cy_frames_create(unsigned int id, void *base, uint32_t frame_bytes, uint32_t count, void *context,
				   cy_take_fn take, cy_give_fn give, cy_count_fn counted, cy_lent_fn sent, int *error)
{
	struct cy_frames *frames = calloc(1, sizeof(*frames));
	const size_t huge = (size_t)2 << 20;
	int rc;

	*error = ENOMEM;
	if (frames == NULL)
		return NULL;
	frames->id = id;
	frames->base = base;
	frames->len = RTE_ALIGN_CEIL((size_t)frame_bytes * count, 4096);
	frames->page_bytes = (uintptr_t)base % huge == 0 && frames->len % huge == 0 ? huge : 4096;
	frames->context = context;
	frames->take = take;
	frames->give = give;
	frames->count = counted;
	frames->sent = sent;
	frames->of = calloc(count, sizeof(*frames->of));
	if (frames->of == NULL) {
		cy_frames_destroy(frames);
		return NULL;
	}
	if (rte_extmem_register(base, frames->len, NULL, 0, frames->page_bytes) != 0) {
		*error = rte_errno;
		cy_frames_destroy(frames);
		return NULL;
	}
	frames->registered = true;
	rc = describe_frames(frames, frame_bytes, count);
	if (rc != 0) {
		*error = -rc;
		cy_frames_destroy(frames);
		return NULL;
	}
	frames->ready = true;
	return frames;
}
