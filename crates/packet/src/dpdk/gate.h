/* Keeps bursts of net_memif apart from what happens to its peer: see gate.c. */
#ifndef CY_GATE_H
#define CY_GATE_H

#include <stdbool.h>
#include <stdint.h>

struct cy_frames;

/* Something that must not happen to a port during a burst. */
struct errand {
	void (*what)(struct errand *errand);
	uint16_t port;
	struct cy_frames *frames;
	bool remove;
	int outcome;
	bool done;
};

/* Around a burst; nothing where the port is not gated. */
void enter_gate(bool gated);
void leave_gate(bool gated);
/* Runs it where it disturbs no burst, and waits for it: its outcome. One at a time. */
int run_errand(struct errand *errand);

#endif
