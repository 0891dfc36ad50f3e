// Streams: in order, and with the rules of captures that a stream's caller can break.
#include "state.h"

namespace fk {
std::unordered_set<void*>& alive() {
    static auto* a = new std::unordered_set<void*>;
    return *a;
}

std::set<Capture*>& captures() {
    static auto* c = new std::set<Capture*>;
    return *c;
}

Stream* legacy() {
    static Stream* s[DEVICES];
    if (!s[device()]) s[device()] = new Stream{0, 0, device()};
    return s[device()];
}

std::set<Stream*>& blocking() {
    static auto* b = new std::set<Stream*>;
    return *b;
}

static thread_local int thread_mode = 0;  // cudaStreamCaptureModeGlobal

Stream* stream(void* h) {
    if (!h || h == (void*)1) return legacy();
    if (h == (void*)2) {
        static thread_local Stream* s = new Stream{0, 0, device()};
        return s;
    }
    if (!alive().count(h)) {
        fault("a stream that does not exist: %p", h);
        return nullptr;
    }
    return (Stream*)h;
}

int kill_capture(Capture* c, int code, const char* why) {
    if (!c->dead) fault("CAPTURE %llu INVALIDATED (%s): %s", c->id, error_name(code), why);
    c->dead = true;
    return code;
}

// What waits for a device or changes its memory breaks captures: those of this thread, and of others in mode global.
int unsafe_call(const char* name) {
    LOCK;
    api(name);
    if (thread_mode == 2) return OK;
    int code = OK;
    for (auto* c : captures()) {
        bool mine = pthread_equal(c->thread, pthread_self());
        if ((mine && c->mode != 2) || (!mine && c->mode == 0 && thread_mode == 0))
            code = kill_capture(c, CAP_UNSUPPORTED, name);
    }
    return code;
}

void run_until(Stream* s, uint64_t mark) {
    while (s->done < mark && !s->queue.empty()) {
        Work w = std::move(s->queue.front());
        s->queue.pop_front();
        s->done++;
        if (w.other) run_until(w.other, w.until);
        if (w.run) w.run();
    }
}

void drain(Stream* s) { run_until(s, s->queued); }

void put(Stream* s, std::function<void()> run, Stream* other, uint64_t until) {
    if (!lazy()) {
        if (run) run();
        s->queued++;
        s->done++;
        return;
    }
    s->queue.push_back({std::move(run), other, until});
    s->queued++;
}

static void order_with_legacy(Stream* s) {
    if (!lazy()) return;
    if (s == legacy()) {
        for (auto* b : blocking()) put(s, nullptr, b, b->queued);
    } else if (!(s->flags & 1))
        put(s, nullptr, legacy(), legacy()->queued);
}

int enter(Stream* s, const char* what) {
    if (!s) return BADHANDLE;
    if (s == legacy()) {
        for (auto* c : captures()) {
            for (auto* other : c->streams)
                if (!(other->flags & 1)) return kill_capture(c, CAP_IMPLICIT, what);
            if (pthread_equal(c->thread, pthread_self()))
                fault("SUSPICIOUS: %s on the default stream while this thread captures another", what);
        }
    }
    if (s->capture && s->capture->dead) return CAP_INVALIDATED;
    if (!s->capture) {
        for (auto* c : captures())
            if (pthread_equal(c->thread, pthread_self()))
                fault("SUSPICIOUS: %s on a stream beside the capture of this thread", what);
        order_with_legacy(s);
    }
    return OK;
}

Node* add(Stream* s, Node n) {
    n.deps = s->tail;
    auto& nodes = s->capture->graph->nodes;
    nodes.emplace_back(new Node(std::move(n)));
    s->tail = {nodes.back().get()};
    return nodes.back().get();
}

int stream_new(void** out, unsigned flags, int priority) {
    LOCK;
    auto* s = new Stream{flags, priority, device()};
    alive().insert(s);
    if (!(flags & 1)) blocking().insert(s);
    *out = s;
    return OK;
}

int stream_free(void* h) {
    LOCK;
    if (!alive().erase(h)) return BADHANDLE;
    auto* s = (Stream*)h;
    drain(s);
    blocking().erase(s);
    if (s->capture) {
        s->capture->streams.erase(s);
        kill_capture(s->capture, CAP_INVALIDATED, "a stream was destroyed");
    }
    return OK;
}

int stream_sync(void* h) {
    LOCK;
    Stream* s = stream(h);
    if (!s) return BADHANDLE;
    if (s->capture) return kill_capture(s->capture, CAP_UNSUPPORTED, "stream synchronise");
    if (int e = enter(s, "stream synchronise")) return e;
    drain(s);
    return OK;
}

int stream_query(void* h) {
    LOCK;
    Stream* s = stream(h);
    if (!s) return BADHANDLE;
    if (s->capture) return kill_capture(s->capture, CAP_UNSUPPORTED, "stream query");
    drain(s);
    return OK;
}

int stream_priority(void* h, int* out) {
    LOCK;
    Stream* s = stream(h);
    if (!s) return BADHANDLE;
    *out = s->priority;
    return OK;
}

int stream_flags(void* h, unsigned* out) {
    LOCK;
    Stream* s = stream(h);
    if (!s) return BADHANDLE;
    *out = s->flags;
    return OK;
}

int device_sync() {
    LOCK;
    for (auto* c : captures())
        if (pthread_equal(c->thread, pthread_self()) && c->mode != 2 && thread_mode != 2)
            return kill_capture(c, CAP_UNSUPPORTED, "device synchronise");
    drain(legacy());
    for (auto* p : alive()) drain((Stream*)p);
    return OK;
}

int exchange(int* mode) {
    std::swap(*mode, thread_mode);
    return OK;
}
}  // namespace fk
