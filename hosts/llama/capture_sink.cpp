#include "capture_sink.h"

#include <atomic>

namespace oscar::llama {
namespace {

std::atomic<CaptureSink*> g_sink{nullptr};

}  // namespace

void set_capture_sink(CaptureSink* sink) { g_sink.store(sink); }
CaptureSink* capture_sink() { return g_sink.load(); }

}  // namespace oscar::llama
