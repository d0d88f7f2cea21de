/*
 * The part of DPDK that the driver uses, as plain functions: DPDK's own are mostly inline.
 *
 * Nothing here keeps state but what cy_frames_create makes (frames.c), which threads may share. A queue is used by one
 * thread at a time, an outbox by its owner.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>

#include "frames.h"
#include "gate.h"

#define CY_BURST 64

/* Negative: what rte_errno says. Once per process. */
int cy_start(int count, char **arguments)
{
	int rc = register_frame_pools();

	if (rc != 0)
		return rc;
	return rte_eal_init(count, arguments) < 0 ? -rte_errno : 0;
}

const char *cy_text(int error)
{
	return rte_strerror(error);
}

/* ---- ports ---- */

struct cy_port_info {
	uint8_t mac[6];
	uint16_t mtu;
	uint16_t receive_slots;
	uint16_t send_slots;
	uint16_t most_pieces; /* of a packet to send; 1: it cannot be in pieces */
	uint16_t most_queues;
	uint16_t send_queues;
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

/* Configures a port: `queues` to receive by, as many to send by, and up to `most_senders` if it has so many; of so many
 * slots if it has them. Zero, or negative. */
int cy_port_setup(uint16_t port, struct cy_frames *frames, uint16_t queues, uint16_t most_senders, uint16_t mtu,
		  uint16_t receive_slots, uint16_t send_slots, struct cy_port_info *info)
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
	/* A queue to send by is one to receive by at the other end of shared memory, where there are as many as here. */
	info->send_queues = memif ? queues : RTE_MAX(queues, RTE_MIN(most_senders, device.max_tx_queues));
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
	rc = rte_eth_dev_configure(port, queues, info->send_queues, &conf);
	if (rc != 0)
		return rc;
	rc = rte_eth_dev_adjust_nb_rx_tx_desc(port, &receive_slots, &send_slots);
	for (uint16_t queue = 0; rc == 0 && queue < queues; queue++)
		rc = rte_eth_rx_queue_setup(port, queue, receive_slots, rte_eth_dev_socket_id(port), NULL,
					    frames->mbufs);
	for (uint16_t queue = 0; rc == 0 && queue < info->send_queues; queue++)
		rc = rte_eth_tx_queue_setup(port, queue, send_slots, rte_eth_dev_socket_id(port), NULL);
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

/* Hands what is ready to the card, if it is `started` behind the gate; answers how many it took. The others stay. */
unsigned int cy_send(uint16_t port, uint16_t queue, struct cy_outbox *box, bool gated, const bool *started)
{
	uint16_t sent = 0;

	if (box->count == 0)
		return 0;
	enter_gate(gated);
	if (__atomic_load_n(started, __ATOMIC_ACQUIRE))
		sent = rte_eth_tx_burst(port, queue, box->ready, box->count);
	leave_gate(gated);
	box->count -= sent;
	memmove(box->ready, box->ready + sent, box->count * sizeof(box->ready[0]));
	return sent;
}

/* Takes back the buffers that the card has read but not let go of, where it can be asked for them. */
void cy_reclaim(uint16_t port, uint16_t queue)
{
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
