// Events: marks in a stream; inside a capture, names of nodes.
#include "state.h"

namespace fk {
static std::unordered_set<void*>& events() {
    static auto* e = new std::unordered_set<void*>;
    return *e;
}

int event_new(void** out, unsigned flags) {
    LOCK;
    auto* e = new Event{flags, device()};
    events().insert(e);
    *out = e;
    return OK;
}

int event_free(void* e) {
    LOCK;
    if (!events().erase(e)) return BADHANDLE;
    return OK;
}  // kept: lazy work may still name it

int event_record(void* h, void* sh, unsigned flags) {
    LOCK;
    auto* e = (Event*)h;
    if (!events().count(h)) return BADHANDLE;
    Stream* s = stream(sh);
    if (int err = enter(s, "event record")) return err;
    if (s->device != e->device) {
        fault("event of device %d recorded on a stream of %d", e->device, s->device);
        return BADHANDLE;
    }
    if (s->capture && (flags & 1)) {
        Node n{4, "event record"};
        n.event = e;
        add(s, n);
        return OK;
    }
    e->recorded = true;
    e->asked = 0;
    if (s->capture) {
        e->capture = s->capture->id;
        e->nodes = s->tail;
        return OK;
    }
    e->capture = 0;
    e->nodes.clear();
    e->stream = s;
    put(s, [e] { e->time = now(); });
    e->mark = s->queued;
    return OK;
}

int stream_wait(void* sh, void* h) {
    LOCK;
    auto* e = (Event*)h;
    if (!events().count(h)) return BADHANDLE;
    Stream* s = stream(sh);
    if (!s) return BADHANDLE;
    if (!e->recorded) return OK;
    if (e->capture) {
        Capture* c = capture_of(e->capture);
        if (!c) {
            fault("wait for an event of a capture that has ended");
            return CAP_EVENT;
        }
        if (!s->capture) {
            if (s == legacy()) return kill_capture(c, CAP_IMPLICIT, "the default stream waits for the capture");
            s->capture = c;
            c->streams.insert(s);
            s->tail = e->nodes;
            return OK;
        }
        if (s->capture != c) {
            kill_capture(s->capture, CAP_MERGE, "wait");
            return kill_capture(c, CAP_MERGE, "wait");
        }
        for (auto* n : e->nodes) s->tail.push_back(n);
        return OK;
    }
    if (s->capture) return kill_capture(s->capture, CAP_ISOLATION, "a capturing stream waits for work outside");
    if (int err = enter(s, "wait for event")) return err;
    put(s, nullptr, e->stream, e->mark);
    return OK;
}

int event_sync(void* h) {
    if (int e = unsafe_call("cudaEventSynchronize")) return e;
    LOCK;
    auto* e = (Event*)h;
    if (!events().count(h)) return BADHANDLE;
    if (e->capture) return CAP_EVENT;
    if (e->recorded && e->stream) run_until(e->stream, e->mark);
    return OK;
}

int event_query(void* h) {
    if (int e = unsafe_call("cudaEventQuery")) return e;
    LOCK;
    auto* e = (Event*)h;
    if (!events().count(h)) return BADHANDLE;
    if (e->capture) return CAP_EVENT;
    if (!e->recorded || !e->stream || e->stream->done >= e->mark) return OK;
    if (e->asked++ < 3) return NOTREADY;
    run_until(e->stream, e->mark);
    return OK;
}

int event_ms(float* out, void* a, void* b) {
    LOCK;
    auto *x = (Event*)a, *y = (Event*)b;
    if (!events().count(a) || !events().count(b) || !x->recorded || !y->recorded || (x->flags & 2) || (y->flags & 2))
        return BADHANDLE;
    if (x->capture || y->capture) return CAP_EVENT;
    if ((x->stream && x->stream->done < x->mark) || (y->stream && y->stream->done < y->mark)) return NOTREADY;
    double ms = y->time - x->time;
    *out = ms < 1e-3 ? 1e-3 : ms;
    return OK;
}
}  // namespace fk
