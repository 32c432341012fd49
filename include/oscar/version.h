#pragma once
namespace oscar {
const char* version();  // "0.1.0"
}
