// What the fake device has to say: counts of calls and launches, which are dumped into a file, and findings, each a
// line of the file that FAKEGPU_LOG names. A fault is what a real device would refuse or what would race there; a note
// is a gap of the fake itself.
#include <unistd.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "state.h"

namespace fk {
double now() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Never freed: threads of torch outlive the library's own destructors.
Mutex& mu() {
    static Mutex* m = new Mutex;
    return *m;
}

bool flag(const char* name) {
    const char* v = getenv(name);
    return v && *v && *v != '0';
}

bool lazy() {
    static bool v = flag("FAKEGPU_LAZY");
    return v;
}

bool zeros() {
    static bool v = !flag("FAKEGPU_BYTES");
    return v;
}

static FILE* sink() {
    static FILE* f = [] {
        const char* p = getenv("FAKEGPU_LOG");
        FILE* g = p && *p ? fopen(p, "a") : nullptr;
        return g ? g : stderr;
    }();
    return f;
}

static void say(const char* kind, const char* format, va_list a) {
    char text[1024];
    vsnprintf(text, sizeof text, format, a);
    fprintf(sink(), "%s: %s\n", kind, text);
    fflush(sink());
}

void fault(const char* format, ...) {
    va_list a;
    va_start(a, format);
    say("fault", format, a);
    va_end(a);
}

void note(const char* format, ...) {
    va_list a;
    va_start(a, format);
    say("note", format, a);
    va_end(a);
}

static std::unordered_map<std::string, uint64_t>& counts() {
    static auto* c = new std::unordered_map<std::string, uint64_t>;
    return *c;
}

void count(const std::string& what, uint64_t n) { counts()[what] += n; }

void api(const char* name) {
    LOCK;
    count(std::string("api ") + name);
}

int unsupported(const char* name) {
    static std::set<std::string> told;
    LOCK;
    if (told.insert(name).second) note("not built: %s", name);
    return NOTSUPPORTED;
}

FK int fk_unsupported(const char* name) { return unsupported(name); }

FK void fakegpu_reset() {
    LOCK;
    counts().clear();
}

FK void fakegpu_dump(const char* path) {
    LOCK;
    FILE* f = fopen(path, "w");
    if (!f) return;
    for (auto& c : counts()) fprintf(f, "%s\t%llu\n", c.first.c_str(), (unsigned long long)c.second);
    fclose(f);
}
}  // namespace fk
