/* The pool's frames as mbufs, and the mbufs for sending: see frames.c. */
#ifndef CY_FRAMES_H
#define CY_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <rte_mbuf.h>
#include <rte_mempool.h>

/* Asked for a free frame: its number, or -1. */
typedef int64_t (*cy_take_fn)(void *context);
/* A frame that is not used any more. */
typedef void (*cy_give_fn)(void *context, uint32_t number);
/* How many frames are free. */
typedef uint32_t (*cy_count_fn)(void *context);
/* A payload has been sent: what cy_lend was given. */
typedef void (*cy_lent_fn)(void *token);

#define CY_TOKEN_BYTES 32
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

/* Makes the operations of such pools known to DPDK; before it starts. Zero, or negative. */
int register_frame_pools(void);

#endif
