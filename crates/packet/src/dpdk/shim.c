/*
 * The part of DPDK that the driver uses, as plain functions: DPDK's own are mostly inline.
 *
 * Frames of the log region are the memory of received packets. DPDK wants an mbuf (a descriptor) for each piece of such
 * memory; here frame and mbuf are bound for ever, by number, and the pool of mbufs has no list of free ones: it asks the
 * pool of frames (take, give). So there is one owner of each frame, and one who counts its readers.
 *
 * Nothing here keeps state but what cy_frames_create makes; all of it is used by one thread at a time, but for take and
 * give, which drivers may call from threads of theirs.
 */

#include <errno.h>
#include <string.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>
#include <rte_mbuf_pool_ops.h>
#include <rte_mempool.h>

#include "gate.h"

/* Asked for a free frame: its number, or -1. */
typedef int64_t (*cy_take_fn)(void *context);
/* A frame that is not used any more. */
typedef void (*cy_give_fn)(void *context, uint32_t number);
/* How many frames are free. */
typedef uint32_t (*cy_count_fn)(void *context);
/* A payload has been sent: what cy_lend was given. */
typedef void (*cy_lent_fn)(void *token);

#define CY_TOKEN_BYTES 32
#define CY_BURST 64
#define CY_LENT_PER_HEADER 4

struct cy_frames {
	unsigned int id;
	struct rte_mempool *mbufs;   /* one for each frame */
	struct rte_mempool *headers; /* memory of their own: headers, and what is copied behind them */
	struct rte_mempool *lent;    /* no memory: name a payload where it lies */
	struct rte_mbuf **of;        /* by number of the frame */
	void *context;
	cy_take_fn take;
	cy_give_fn give;
	cy_count_fn count;
	cy_lent_fn sent;
	void *base;
	size_t len;
	size_t page_bytes;
	bool registered;
	bool ready; /* the mbufs are made; before that, giving only means that there is one more */
};

/* Behind a frame's mbuf. */
struct cy_bound {
	uint64_t number;
};

/* Behind the mbuf of a payload. */
struct cy_loan {
	struct rte_mbuf_ext_shared_info shared;
	cy_lent_fn sent;
	unsigned char token[CY_TOKEN_BYTES];
};

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

/* Negative: what rte_errno says. Once per process. */
int cy_start(int count, char **arguments)
{
	if (rte_mempool_register_ops(&frame_ops) < 0)
		return -ENOSPC;
	return rte_eal_init(count, arguments) < 0 ? -rte_errno : 0;
}

const char *cy_text(int error)
{
	return rte_strerror(error);
}

/* ---- memory ---- */

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

/* ---- ports ---- */

struct cy_port_info {
	uint8_t mac[6];
	uint16_t mtu;
	uint16_t receive_slots;
	uint16_t send_slots;
	uint16_t most_pieces; /* of a packet to send; 1: it cannot be in pieces */
	uint16_t most_queues;
	bool gated; /* bursts lock the gate */
	bool copies; /* whoever sends gets the buffers back at once, and whoever receives fills them to the last byte */
};

/* Finds a device by its name, or makes it known (a PCI address, a virtual device with its arguments). The port's
 * number, or negative. */
int cy_port_find(const char *name, const char *device, bool *made)
{
	uint16_t port;
	int rc;

	*made = false;
	if (rte_eth_dev_get_port_by_name(name, &port) == 0)
		return port;
	rc = rte_dev_probe(device);
	if (rc != 0)
		return rc;
	*made = true;
	return rte_eth_dev_get_port_by_name(name, &port) == 0 ? port : -ENODEV;
}

/* Configures a port; `queues` of each kind, of so many slots if it has them. Zero, or negative. */
int cy_port_setup(uint16_t port, struct cy_frames *frames, uint16_t queues, uint16_t mtu, uint16_t receive_slots,
		  uint16_t send_slots, struct cy_port_info *info)
{
	struct rte_eth_conf conf = {0};
	struct rte_eth_dev_info device;
	struct rte_ether_addr mac;
	bool memif;
	int rc = rte_eth_dev_info_get(port, &device);

	if (rc != 0)
		return rc;
	memif = strcmp(device.driver_name, "net_memif") == 0;
	info->copies = memif || strcmp(device.driver_name, "net_af_packet") == 0;
	/* These keep no buffers, and have slots of their own. */
	send_slots = info->copies ? RTE_MIN(send_slots, 1024) : send_slots;
	info->most_queues = RTE_MIN(device.max_rx_queues, device.max_tx_queues);
	if (queues > info->most_queues)
		return -ERANGE;
	/* The card reads and writes the frames. Virtual devices do not, and their buses cannot map memory. */
	rc = rte_dev_dma_map(device.device, frames->base, (uint64_t)(uintptr_t)frames->base, frames->len);
	if (rc != 0 && rte_errno != ENOTSUP)
		return -EFAULT;
	/* net_memif refuses to hear of larger packets, and carries them. */
	conf.rxmode.mtu = mtu == RTE_ETHER_MTU || memif ? 0 : mtu;
	conf.rxmode.offloads = device.rx_offload_capa & RTE_ETH_RX_OFFLOAD_SCATTER;
	conf.txmode.offloads = device.tx_offload_capa & RTE_ETH_TX_OFFLOAD_MULTI_SEGS;
	if (queues > 1 && device.flow_type_rss_offloads != 0) {
		conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
		conf.rx_adv_conf.rss_conf.rss_hf =
			(RTE_ETH_RSS_IP | RTE_ETH_RSS_UDP) & device.flow_type_rss_offloads;
	}
	rc = rte_eth_dev_configure(port, queues, queues, &conf);
	if (rc != 0)
		return rc;
	rc = rte_eth_dev_adjust_nb_rx_tx_desc(port, &receive_slots, &send_slots);
	for (uint16_t queue = 0; rc == 0 && queue < queues; queue++) {
		rc = rte_eth_rx_queue_setup(port, queue, receive_slots, rte_eth_dev_socket_id(port), NULL,
					    frames->mbufs);
		if (rc == 0)
			rc = rte_eth_tx_queue_setup(port, queue, send_slots, rte_eth_dev_socket_id(port), NULL);
	}
	if (rc != 0)
		return rc;
	rc = rte_eth_macaddr_get(port, &mac);
	if (rc != 0)
		return rc;
	memcpy(info->mac, mac.addr_bytes, sizeof(info->mac));
	rc = rte_eth_dev_get_mtu(port, &info->mtu);
	if (rc != 0)
		return rc;
	info->gated = memif;
	if (memif)
		info->mtu = mtu;
	info->receive_slots = receive_slots;
	info->send_slots = send_slots;
	info->most_pieces = 1;
	if (conf.txmode.offloads & RTE_ETH_TX_OFFLOAD_MULTI_SEGS) {
		uint16_t most = device.tx_desc_lim.nb_mtu_seg_max;

		info->most_pieces = most == 0 || most > 16 ? 16 : most;
	}
	return 0;
}

bool cy_port_up(uint16_t port)
{
	struct rte_eth_link link = {0};

	return rte_eth_link_get_nowait(port, &link) == 0 && link.link_status == RTE_ETH_LINK_UP;
}

static void start_port(struct errand *errand)
{
	errand->outcome = rte_eth_dev_start(errand->port);
	if (errand->outcome != 0)
		return;
	/* Questions about neighbours come to groups and to everybody. Where there are no filters, there is no call. */
	if (rte_eth_allmulticast_enable(errand->port) != 0)
		rte_eth_promiscuous_enable(errand->port);
}

int cy_port_start(uint16_t port)
{
	struct errand errand = {.what = start_port, .port = port};

	return run_errand(&errand);
}

static void stop_port(struct errand *errand)
{
	rte_eth_dev_stop(errand->port);
}

void cy_port_stop(uint16_t port)
{
	struct errand errand = {.what = stop_port, .port = port};

	run_errand(&errand);
}

static void close_port(struct errand *errand)
{
	struct cy_frames *frames = errand->frames;
	struct rte_eth_dev_info device = {0};
	int known = rte_eth_dev_info_get(errand->port, &device);

	rte_eth_dev_stop(errand->port);
	rte_eth_dev_close(errand->port);
	if (known == 0 && frames != NULL)
		rte_dev_dma_unmap(device.device, frames->base, (uint64_t)(uintptr_t)frames->base, frames->len);
	if (known == 0 && errand->remove)
		rte_dev_remove(device.device);
}

/* Gives the device up. The frames that it had are given back. */
void cy_port_close(uint16_t port, struct cy_frames *frames, bool remove)
{
	struct errand errand = {.what = close_port, .port = port, .frames = frames, .remove = remove};

	run_errand(&errand);
}

/* What the card itself has dropped: no frame was offered, and damaged packets. */
void cy_port_dropped(uint16_t port, uint64_t *missed, uint64_t *damaged)
{
	struct rte_eth_stats stats = {0};

	rte_eth_stats_get(port, &stats);
	*missed = stats.imissed + stats.rx_nombuf;
	*damaged = stats.ierrors;
}

/* ---- packets in ---- */

struct cy_piece {
	uint32_t frame;
	uint16_t at;
	uint16_t len;
	uint16_t last; /* of its packet */
};

/* Receives up to `most` packets as pieces, whose frames are the caller's from now on. `room`: for how many pieces; a packet
 * of more than `room / most` pieces is dropped and counted. */
unsigned int cy_receive(struct cy_frames *frames, uint16_t port, uint16_t queue, struct cy_piece *pieces,
			unsigned int room, unsigned int most, bool gated, uint64_t *dropped)
{
	struct rte_mbuf *packets[CY_BURST];
	unsigned int made = 0, each;
	uint16_t count;

	most = RTE_MIN(most, CY_BURST);
	if (most == 0)
		return 0;
	each = room / most;
	enter_gate(gated);
	count = rte_eth_rx_burst(port, queue, packets, most);
	leave_gate(gated);
	for (uint16_t i = 0; i < count; i++) {
		struct rte_mbuf *mbuf = packets[i];
		/* A tag that the card, or the kernel, has taken off makes it a packet of another network. */
		bool ours = mbuf->nb_segs <= each && !(mbuf->ol_flags & RTE_MBUF_F_RX_VLAN_STRIPPED);

		for (struct rte_mbuf *m = mbuf; m != NULL; m = m->next)
			ours = ours && m->pool == frames->mbufs;
		if (!ours) {
			*dropped += 1;
			rte_pktmbuf_free(mbuf);
			continue;
		}
		while (mbuf != NULL) {
			struct rte_mbuf *next = mbuf->next;
			struct cy_bound *bound = rte_mbuf_to_priv(mbuf);

			pieces[made].frame = bound->number;
			pieces[made].at = mbuf->data_off;
			pieces[made].len = mbuf->data_len;
			pieces[made].last = next == NULL;
			made++;
			/* As it has to be when its frame is taken again. */
			mbuf->next = NULL;
			mbuf->nb_segs = 1;
			mbuf->ol_flags = RTE_MBUF_F_EXTERNAL;
			mbuf = next;
		}
	}
	return made;
}

/* ---- packets out ---- */

/* A packet in the making, and those that are ready. */
struct cy_outbox {
	struct rte_mbuf *ready[CY_BURST];
	uint16_t count;
	struct rte_mbuf *first;
	struct rte_mbuf *last;
};

struct cy_outbox *cy_outbox_create(void)
{
	return calloc(1, sizeof(struct cy_outbox));
}

void cy_outbox_destroy(struct cy_outbox *box)
{
	rte_pktmbuf_free(box->first);
	for (uint16_t i = 0; i < box->count; i++)
		rte_pktmbuf_free(box->ready[i]);
	free(box);
}

static void add_piece(struct cy_outbox *box, struct rte_mbuf *mbuf)
{
	if (box->first == NULL) {
		box->first = mbuf;
		mbuf->pkt_len = mbuf->data_len;
	} else {
		box->last->next = mbuf;
		box->first->nb_segs++;
		box->first->pkt_len += mbuf->data_len;
	}
	box->last = mbuf;
}

/* A new piece of `len` bytes in memory of its own, for the caller to fill. NULL: none is free, or it does not fit. */
void *cy_copy(struct cy_frames *frames, struct cy_outbox *box, uint16_t len)
{
	struct rte_mbuf *mbuf = rte_pktmbuf_alloc(frames->headers);

	if (mbuf == NULL)
		return NULL;
	void *data = rte_pktmbuf_append(mbuf, len);

	if (data == NULL)
		rte_pktmbuf_free(mbuf);
	else
		add_piece(box, mbuf);
	return data;
}

static void loan_ends(void *address, void *opaque)
{
	struct cy_loan *loan = opaque;

	(void)address;
	loan->sent(loan->token);
}

/* A piece that stays where it is; `token` is handed to `sent` when the card has read it. False: none is free. */
bool cy_lend(struct cy_frames *frames, struct cy_outbox *box, void *address, uint16_t len, const void *token,
	     size_t token_bytes)
{
	struct rte_mbuf *mbuf;
	struct cy_loan *loan;

	if (token_bytes > CY_TOKEN_BYTES)
		return false;
	mbuf = rte_pktmbuf_alloc(frames->lent);
	if (mbuf == NULL)
		return false;
	loan = rte_mbuf_to_priv(mbuf);
	memcpy(loan->token, token, token_bytes);
	loan->sent = frames->sent;
	loan->shared.free_cb = loan_ends;
	loan->shared.fcb_opaque = loan;
	rte_mbuf_ext_refcnt_set(&loan->shared, 1);
	rte_pktmbuf_attach_extbuf(mbuf, address, (rte_iova_t)(uintptr_t)address, len, &loan->shared);
	mbuf->data_len = len;
	add_piece(box, mbuf);
	return true;
}

/* The packet in the making is given up. */
void cy_discard(struct cy_outbox *box)
{
	rte_pktmbuf_free(box->first);
	box->first = NULL;
	box->last = NULL;
}

/* The packet in the making is ready; answers how many are. There is room for it if cy_send was called at CY_BURST. */
unsigned int cy_ready(struct cy_outbox *box)
{
	box->ready[box->count++] = box->first;
	box->first = NULL;
	box->last = NULL;
	return box->count;
}

/* Hands what is ready to the card; answers how many it took. The others stay. */
unsigned int cy_send(uint16_t port, uint16_t queue, struct cy_outbox *box, bool gated)
{
	uint16_t sent;

	if (box->count == 0)
		return 0;
	enter_gate(gated);
	sent = rte_eth_tx_burst(port, queue, box->ready, box->count);
	leave_gate(gated);
	box->count -= sent;
	memmove(box->ready, box->ready + sent, box->count * sizeof(box->ready[0]));
	return sent;
}

/* Takes back the buffers that the card has read but not let go of, where it can be asked for them. */
void cy_reclaim(uint16_t port, uint16_t queues)
{
	for (uint16_t queue = 0; queue < queues; queue++)
		rte_eth_tx_done_cleanup(port, queue, 0);
}

/* Gives up what is ready; answers how many packets. */
unsigned int cy_drop(struct cy_outbox *box)
{
	unsigned int dropped = box->count;

	for (uint16_t i = 0; i < box->count; i++)
		rte_pktmbuf_free(box->ready[i]);
	box->count = 0;
	return dropped;
}
