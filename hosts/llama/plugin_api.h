// C entry points of liboscar-llama.so for programs that load it themselves (the `oscar` command, ctypes). Programs that load
// it through GGML_BACKEND_PATH or LD_PRELOAD configure it with the environment instead; both use the same names.
//
// Configuration (JSON keys here; environment twin OSCAR_<KEY IN CAPITALS>):
//   mode       "oscar" (default: the artifact's codec) | "exact" (own store, every row 16 bit) | "delegate" (hooks forward
//              only) | "capture" (stock attention, moments collected) | "off" (nothing is patched; environment only)
//   artifact   path; default: found beside the model
//   strict     1: a bypassed attention operation, an unusable artifact or a refused cache ends the program (exit code 3)
//   stats      path; counters as JSON at exit and on SIGUSR1
//   sink, recent, rollback     windows (64, 256, 64)
//   k_mean (none|static|rope), v_mean (none|static), clip_k, clip_v,
//   codec (spectral|int2|sim:NAME), k_bits, v_bits (1.5|2|2.5|3; spectral only),
//   layer_bits (other rates for single layers, see oscar/codec/rates.h; spectral only)     override the artifact's recipe;
//              k_bits and v_bits hold for all layers, also those that the artifact gives another rate
//              sim:NAME simulates a rival (oscar/rivals/rivals.h): its accuracy, not its memory or speed
//   log        0 errors and the configuration line (default 1), 2 every decision
// and two hooks for measuring and testing, 0 or 1:
//   perturb_q  flips the lowest mantissa bit of the first coordinate of each head of every query before attention: in mode
//              "exact", what then differs from "exact" is the noise floor of a comparison on this model
//   check      compares the last token of every attention operation with the double-precision definition (counted in stats)
#pragma once

#if defined(__GNUC__)
#define OSCAR_API __attribute__((visibility("default")))
#else
#define OSCAR_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// All functions returning `const char *` give NULL for success or one sentence, valid until the thread's next call.

// Merges JSON into the configuration; applies to caches created afterwards.
OSCAR_API const char* oscar_llama_configure(const char* json);

// Counters of this process as JSON text (the content of the OSCAR_STATS file); valid until the thread's next call. Keys:
//   ggml_version, mode, artifact_digest, cpu_path,
//   attention_served, attention_bypassed, attention_sliding_window (stock, by design), set_rows, graphs, shifts,
//   captured_blocks, caches [{layers, sliding_window, cells, streams, cells_used, nominal_bytes, nominal_resident_bytes,
//   code_bytes,
//            exact_bytes, peak_exact_bytes, bookkeeping_bytes, resident_bytes, rows_written, window_misses, imported_rows,
//            exported_rows, shifted_rows, saturated, coded_values, sanitised, bits_per_element, bits_per_element_all,
//            simulated}] (simulated: code_bytes and bits are what the rival would take, resident_bytes what its simulation
//            takes) (freed ones first, then live ones, each in order of creation)
//   refused: null or a sentence
OSCAR_API const char* oscar_llama_stats(void);

// Moment capture (mode "capture"). model_json: {fingerprint, architecture, name, n_layer, sources: [{name, sha256, tokens}]}.
OSCAR_API const char* oscar_llama_capture_begin(const char* model_json, const char* resume_path /* or NULL */);
// For the layers it is given for, before the first token: W_o^T W_o of each query head, [n_head, v_dim, v_dim] row-major, what
// value errors of a head cost at the layer's output. Without it: identity.
OSCAR_API const char* oscar_llama_capture_output_metric(int layer, const float* values, unsigned long long count);
// Declares that the next tokens start a new sequence (resets warm-up exclusion; the caller clears the cache).
OSCAR_API const char* oscar_llama_capture_sequence(void);
// What has been read so far in all runs, [{name, sha256, tokens}], for those who read their sources in another order than
// announced. Without it, tokens are credited to the announced sources one after the other.
OSCAR_API const char* oscar_llama_capture_sources(const char* json);
OSCAR_API const char* oscar_llama_capture_save(const char* path);
// Frees the moments; no context may be left.
OSCAR_API const char* oscar_llama_capture_end(void);

#ifdef __cplusplus
}
#endif
