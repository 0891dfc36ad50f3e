// State of the fake device that its sources share; the libraries beside libcuda see fake.h alone. Everything behind
// LOCK.
#pragma once
#include <pthread.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "fake.h"
#define LOCK std::lock_guard<Mutex> lock_(mu())

namespace fk {
const int DEVICES = 8;
typedef std::recursive_mutex Mutex;

// Memory, by its address. `mapped` counts what the device's units add, `fd` is of memory that processes share.
struct Alloc {
    size_t size, mapped;
    Kind kind;
    uint64_t id;
    bool registered;
    int device, fd;
};

// Of a graph, what a replay needs of it. `type` is 0 for a launch, 1 for a copy (`value` its direction), 2 for a fill,
// 3 for a call of the host, 4 for an event, 5 for a graph inside.
struct Node {
    int type;
    std::string name;
    void* dst;
    const void* src;
    size_t n;
    int value, width;
    HostFn fn;
    void* data;
    Event* event;
    Exec* child;
    std::vector<Node*> deps;
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
};

// In progress. `mode` is a cudaStreamCaptureMode; `dead` once its rules were broken; the graph is the caller's at its
// end.
struct Capture {
    int mode;
    bool dead;
    unsigned long long id;
    Graph* graph;
    Stream* origin;
    pthread_t thread;
    std::set<Stream*> streams;
};

// In a stream's queue: what runs, once another stream has come so far.
struct Work {
    std::function<void()> run;
    Stream* other;
    uint64_t until;
};

// In order. `tail` are the nodes that the next one of its capture depends on; `queued` and `done` count its work.
struct Stream {
    unsigned flags;
    int priority;
    int device;
    Capture* capture = nullptr;
    std::vector<Node*> tail;
    std::deque<Work> queue;
    uint64_t queued = 0, done = 0;
};

// A place in a stream, by its count, or in a capture, by its nodes. `asked` counts queries that it answered "not yet".
struct Event {
    unsigned flags;
    int device;
    bool recorded = false;
    Stream* stream = nullptr;
    uint64_t mark = 0;
    double time = 0;
    unsigned long long capture = 0;
    std::vector<Node*> nodes;
    int asked = 0;
};

// A graph that can be launched, and how often each kind of launch is in it.
struct Exec {
    std::vector<Node> nodes;
    std::unordered_map<std::string, uint64_t> kinds;
};

Mutex& mu();
double now();                 // milliseconds
bool flag(const char* name);  // of the environment
bool lazy();                  // work runs only once somebody waits for it: what reads too early reads rubbish
bool zeros();                 // device memory is never written and reads as zeros: weights take no memory of the host
void count(const std::string& what, uint64_t n = 1);
std::map<uintptr_t, Alloc>& allocs();
std::map<uintptr_t, Alloc>::iterator find(const void* p);
std::unordered_set<void*>& alive();  // streams
std::set<Stream*>& blocking();       // those that wait for the default stream
std::set<Capture*>& captures();      // in progress
Stream* legacy();                    // the default stream of the current device
Stream* stream(void* handle);        // null where there is none
Capture* capture_of(unsigned long long id);
int kill_capture(Capture* c, int code, const char* why);
void run_until(Stream* s, uint64_t mark);
void drain(Stream* s);
void put(Stream* s, std::function<void()> run, Stream* other = nullptr, uint64_t until = 0);
int enter(Stream* s, const char* what);  // before work joins a stream: what forbids it
Node* add(Stream* s, Node n);
void move(void* dst, const void* src, size_t n, int way);
void set(void* dst, int value, int width, size_t n);
}  // namespace fk
