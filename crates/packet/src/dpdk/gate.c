/*
 * net_memif hears of its peer in DPDK's interrupt thread. When the peer goes it unmaps there what a burst in another thread
 * may just be reading, and frees what stopping and closing free as well; nothing in it keeps these apart. So we do:
 *
 *   - Whatever the interrupt thread does, it does with the gate locked, and a burst locks the gate. The thread cannot be
 *     told to lock something before it calls a handler. But it calls our keeper as well, in each of its rounds, because the
 *     keeper's descriptor is always readable. The keeper opens the gate, waits for a while, locks it, and returns. So
 *     the thread waits inside the keeper, not outside, and comes out with the gate locked.
 *   - Starting, stopping and closing are errands that the keeper runs, with the gate locked.
 *
 * Other drivers need none of this.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#include <rte_common.h>
#include <rte_ethdev.h>
#include <rte_interrupts.h>

#include "gate.h"

#define KEEPER_WAITS_NS 50000000 /* a server answers one message of a peer's in each round: several per handshake */
#define KEEPER_HURRIES_NS 5000000 /* while a port connects: they have to exchange some messages */
#define KEEPER_EXPECTS_NS 20000000 /* while a server's port waits for whoever connects: seven of its rounds, in half a second */
#define ROUNDS_PER_SECOND(ns) (1000000000u / (ns))

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t errand_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t errand_news;
static struct errand *errand_waiting;
static bool kept; /* the keeper is at work; the caller lets one errand run at a time */
static bool keeper_inside;
static bool gate_wanted; /* by the keeper, who would wait long for a lock that bursts take again and again */

/* The keeper does not wait by a clock that people set: set back, it would keep whoever comes waiting for as long. */
RTE_INIT(make_errand_news)
{
	pthread_condattr_t by_clock;

	pthread_condattr_init(&by_clock);
	pthread_condattr_setclock(&by_clock, CLOCK_MONOTONIC);
	pthread_cond_init(&errand_news, &by_clock);
	pthread_condattr_destroy(&by_clock);
}

static bool is_memif(uint16_t port)
{
	struct rte_eth_dev_info device = {0};

	return rte_eth_dev_info_get(port, &device) == 0 && strcmp(device.driver_name, "net_memif") == 0;
}

/* Rounds that the keeper will hurry, and those in which it expects somebody. */
static unsigned int rounds_to_hurry, rounds_to_expect;

void cy_hurry(void)
{
	__atomic_store_n(&rounds_to_hurry, ROUNDS_PER_SECOND(KEEPER_HURRIES_NS), __ATOMIC_RELAXED);
}

void cy_expect(void)
{
	__atomic_store_n(&rounds_to_expect, ROUNDS_PER_SECOND(KEEPER_EXPECTS_NS), __ATOMIC_RELAXED);
}

static bool took_one(unsigned int *rounds)
{
	unsigned int left = __atomic_load_n(rounds, __ATOMIC_RELAXED);

	if (left == 0)
		return false;
	__atomic_store_n(rounds, left - 1, __ATOMIC_RELAXED);
	return true;
}

static long keeper_wait(void)
{
	if (took_one(&rounds_to_hurry))
		return KEEPER_HURRIES_NS;
	return took_one(&rounds_to_expect) ? KEEPER_EXPECTS_NS : KEEPER_WAITS_NS;
}

static void keep_gate(void *unused)
{
	long wait = keeper_wait();
	struct timespec until;
	struct errand *errand;

	(void)unused;
	if (keeper_inside) {
		pthread_mutex_unlock(&gate);
		__atomic_store_n(&gate_wanted, false, __ATOMIC_RELEASE);
	}
	keeper_inside = true;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += wait;
	if (until.tv_nsec >= 1000000000) {
		until.tv_nsec -= 1000000000;
		until.tv_sec++;
	}
	pthread_mutex_lock(&errand_lock);
	if (errand_waiting == NULL)
		pthread_cond_timedwait(&errand_news, &errand_lock, &until);
	errand = errand_waiting;
	errand_waiting = NULL;
	pthread_mutex_unlock(&errand_lock);
	__atomic_store_n(&gate_wanted, true, __ATOMIC_RELEASE);
	pthread_mutex_lock(&gate);
	if (errand == NULL)
		return;
	errand->what(errand);
	pthread_mutex_lock(&errand_lock);
	errand->done = true;
	pthread_cond_broadcast(&errand_news);
	pthread_mutex_unlock(&errand_lock);
}

void enter_gate(bool gated)
{
	if (!gated)
		return;
	while (__atomic_load_n(&gate_wanted, __ATOMIC_ACQUIRE))
		sched_yield();
	pthread_mutex_lock(&gate);
}

void leave_gate(bool gated)
{
	if (gated)
		pthread_mutex_unlock(&gate);
}

/* Zero, or negative. */
static int employ_keeper(void)
{
	struct rte_intr_handle *handle = rte_intr_instance_alloc(RTE_INTR_INSTANCE_F_PRIVATE);
	int always_readable = eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC);

	if (handle == NULL || always_readable < 0)
		return -ENOMEM;
	rte_intr_fd_set(handle, always_readable);
	rte_intr_type_set(handle, RTE_INTR_HANDLE_EXT);
	return rte_intr_callback_register(handle, keep_gate, NULL);
}

int run_errand(struct errand *errand)
{
	if (!is_memif(errand->port)) {
		errand->what(errand);
		return errand->outcome;
	}
	pthread_mutex_lock(&errand_lock);
	if (!kept) {
		errand->outcome = employ_keeper();
		kept = errand->outcome == 0;
	}
	if (kept) {
		while (errand_waiting != NULL)
			pthread_cond_wait(&errand_news, &errand_lock);
		errand_waiting = errand;
		pthread_cond_broadcast(&errand_news);
		while (!errand->done)
			pthread_cond_wait(&errand_news, &errand_lock);
	}
	pthread_mutex_unlock(&errand_lock);
	return errand->outcome;
}
