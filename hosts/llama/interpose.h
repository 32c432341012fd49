// Interposition: functions of the existing CPU device are replaced in place. We add no device, so the scheduler sees the
// graph splits, threads and repacked weights of a stock program.
#pragma once

#include <string>

#include "host.h"

namespace oscar::llama {

ggml_backend_dev_t find_cpu();
void interpose(ggml_backend_dev_t cpu);  // once, after self_probe()

}  // namespace oscar::llama
