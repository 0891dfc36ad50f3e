// Captures and the graphs that they become.
#include <set>

#include "state.h"

namespace fk {
static unsigned long long capture_ids = 0;

Capture* capture_of(unsigned long long id) {
    for (auto* c : captures())
        if (c->id == id) return c;
    return nullptr;
}

int begin(void* h, int mode) {
    LOCK;
    Stream* s = stream(h);
    if (!s) return BADHANDLE;
    if (s == legacy()) return CAP_UNSUPPORTED;
    if (s->capture) return ILLEGAL_STATE;
    auto* c = new Capture{mode, false, ++capture_ids, new Graph, s, pthread_self()};
    c->streams.insert(s);
    s->capture = c;
    s->tail.clear();
    captures().insert(c);
    return OK;
}

int end(void* h, void** out) {
    LOCK;
    *out = nullptr;
    Stream* s = stream(h);
    if (!s) return BADHANDLE;
    Capture* c = s->capture;
    if (!c) return ILLEGAL_STATE;
    int code = OK;
    if (s != c->origin) return kill_capture(c, CAP_UNMATCHED, "ended on another stream");
    if (c->mode != 2 && !pthread_equal(c->thread, pthread_self()))
        return kill_capture(c, CAP_THREAD, "ended on another thread");
    if (c->dead)
        code = CAP_INVALIDATED;
    else {
        std::set<Node*> seen;
        std::vector<Node*> todo = s->tail;
        while (!todo.empty()) {
            Node* n = todo.back();
            todo.pop_back();
            if (seen.insert(n).second) todo.insert(todo.end(), n->deps.begin(), n->deps.end());
        }
        for (auto* other : c->streams)
            for (auto* n : other->tail)
                if (!seen.count(n)) {
                    fault("CAPTURE %llu: unjoined %s", c->id, n->name.c_str());
                    code = CAP_UNJOINED;
                }
    }
    for (auto* other : c->streams) {
        other->capture = nullptr;
        other->tail.clear();
    }
    captures().erase(c);
    if (code == OK) {
        *out = c->graph;
    }
    return code;
}

int info(void* h, int* status, unsigned long long* id, void** graph, const void*** deps, size_t* ndeps) {
    LOCK;
    if (h == nullptr || h == (void*)1) {
        for (auto* c : captures())
            for (auto* o : c->streams)
                if (!(o->flags & 1)) return CAP_IMPLICIT;
        *status = 0;
        return OK;
    }
    Stream* s = stream(h);
    if (!s) return BADHANDLE;
    Capture* c = s->capture;
    *status = !c ? 0 : c->dead ? 2 : 1;
    if (!c) return OK;
    if (id) *id = c->id;
    if (graph) *graph = c->graph;
    if (deps) *deps = (const void**)s->tail.data();
    if (ndeps) *ndeps = s->tail.size();
    return OK;
}

int update_deps(void* h, void** deps, size_t n, unsigned flags) {
    LOCK;
    Stream* s = stream(h);
    if (!s || !s->capture) return ILLEGAL_STATE;
    if (flags) s->tail.clear();
    for (size_t i = 0; i < n; i++) s->tail.push_back((Node*)deps[i]);
    return OK;
}

int graph_free(void* g) {
    LOCK;
    delete (Graph*)g;
    return OK;
}

int instantiate(void** out, void* g) {
    if (int e = unsafe_call("cudaGraphInstantiate")) return e;
    LOCK;
    auto* x = new Exec;
    for (auto& n : ((Graph*)g)->nodes) {
        x->nodes.push_back(*n);
        x->nodes.back().deps.clear();
        if (n->type != 5)
            x->kinds["graph " + n->name]++;
        else
            for (auto& k : n->child->kinds) x->kinds[k.first] += k.second;
    }
    *out = x;
    return OK;
}

int exec_free(void* e) {
    LOCK;
    device_sync();
    delete (Exec*)e;
    return OK;
}

static void replay(Exec* x) {
    for (auto& n : x->nodes) {
        if (n.type == 1)
            move(n.dst, n.src, n.n, n.value);
        else if (n.type == 2)
            set(n.dst, n.value, n.width, n.n);
        else if (n.type == 3)
            n.fn(n.data);
        else if (n.type == 4) {
            n.event->recorded = true;
            n.event->time = now();
        } else if (n.type == 5)
            replay(n.child);
    }
}

int graph_launch(void* e, void* h) {
    LOCK;
    auto* x = (Exec*)e;
    Stream* s = stream(h);
    if (int err = enter(s, "graph launch")) return err;
    if (s->capture) {
        Node n{5, "graph"};
        n.child = x;
        add(s, n);
        return OK;
    }
    count("graphs");
    for (auto& k : x->kinds) count(k.first, k.second);
    put(s, [x] { replay(x); });
    return OK;
}

int graph_nodes(void* g, void** nodes, size_t* n) {
    LOCK;
    auto& v = ((Graph*)g)->nodes;
    if (nodes)
        for (size_t i = 0; i < *n && i < v.size(); i++) nodes[i] = v[i].get();
    *n = v.size();
    return OK;
}

int node_type(void* n) {
    static const int types[] = {0, 1, 2, 3, 7, 4};
    return types[((Node*)n)->type];
}

int node_deps(void* node, void** deps, size_t* n) {
    auto& v = ((Node*)node)->deps;
    if (deps)
        for (size_t i = 0; i < *n && i < v.size(); i++) deps[i] = v[i];
    *n = v.size();
    return OK;
}
}  // namespace fk
