// Collects the moments of every layer from running attention operations (mode "capture"): what `oscar calibrate` drives.
//
// Every thread of llama.cpp's pool sees every block in the same order and accumulates its own heads, so results do not
// depend on the number of threads. A block holds at most kMomentBlock consecutive tokens of one sequence and never crosses a
// multiple of kMomentBlock positions. A block with a NaN or Inf is left out for all heads, counted and named on stderr.
//
// Memory: one MomentCollector per full-attention layer and a few hundred KiB per thread, however many tokens pass by.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "capture_sink.h"
#include "oscar/attention/importance_collector.h"

namespace oscar::llama {

class Capture final : public CaptureSink {
 public:
  // `model` names the model and the sources that are about to be read, in order, with their token counts; its layers are
  // empty. `resume`: moments of an earlier run over the same model, which this run's are added to.
  Capture(ModelMoments model, std::optional<ModelMoments> resume, CollectorConfig config = {});

  void on_attention(const CaptureEvent& event, int ith, int nth) override;

  void set_output_metric(int layer, std::vector<float> metric);  // see plugin_api.h
  // The next token must be at position 0. Counts the sequence that ends here.
  void begin_sequence();
  // What has been read so far, all runs, instead of what the order of the announced sources suggests.
  void set_sources(std::vector<TextSource> sources);
  // Everything so far, resumed moments included, written atomically. Collection goes on afterwards in fresh collectors whose
  // moments are added to the saved ones, so a run that is killed after a save and resumed from its file gives byte for byte
  // what the uninterrupted run gives. Error when no token was captured or a layer could not be captured.
  void save(const std::string& path);

  [[nodiscard]] std::uint64_t blocks() const { return blocks_; }      // blocks accumulated, all layers
  [[nodiscard]] std::uint64_t rejected() const { return rejected_; }  // blocks left out, all layers

 private:
  struct Layer {
    LayerShape shape;
    std::unique_ptr<MomentCollector> collector;       // null: sliding window, or nothing was seen since the last save
    std::unique_ptr<ImportanceCollector> importance;  // as collector; or not to be had (see `no_importance`)
    std::vector<std::int64_t> cells;                  // of the running sequence, by position
    std::int64_t tokens = 0;                          // since the last save
  };

  Layer* layer_of(const CaptureEvent& event);
  void collect(Layer& layer, const CaptureEvent& event, int ith, int nth);
  static void collect_importance(Layer& layer, const CaptureEvent& event, int ith, int nth);
  void start(Layer& layer) const;
  void follow(Layer& layer, const CaptureEvent& event);
  void end_sequences();
  void note_error(const std::string& sentence);
  ModelMoments take_session();
  [[nodiscard]] std::vector<TextSource> credited_sources() const;

  ModelMoments model_;
  std::optional<ModelMoments> base_;         // resumed and already saved moments
  std::vector<TextSource> resumed_sources_;  // of earlier runs
  std::optional<std::vector<TextSource>> given_sources_;
  CollectorConfig config_;
  std::int64_t tokens_ = 0;  // of this run, all saves
  std::mutex mutex_;         // layers_ and error_
  std::map<int, Layer> layers_;
  std::string error_;  // the first; save() reports it
  std::map<int, std::shared_ptr<const std::vector<float>>> output_metrics_;
  std::string no_importance_;  // why the importance of keys cannot be collected; said once
  std::atomic<bool> expect_start_{false};
  std::atomic<std::uint64_t> blocks_{0}, rejected_{0};
};

// Blocks accumulated by this process's capture; 0 when there is none.
std::uint64_t captured_blocks();

}  // namespace oscar::llama
