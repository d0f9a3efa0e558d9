// A skeleton in C++17: read inputs, compute, write MINE for check_numpy.py. Put your kernel in the place of `attend`.
//
//   g++ -std=c++17 -O2 -o skeleton vectors/skeleton.cpp && ./skeleton vectors mine
//   python vectors/check_numpy.py vectors mine
//
// It needs no library, and computes attention over given blocks, `out` and `lse` of the group sparse_attention.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

namespace fs = std::filesystem;

struct Tensor { std::string dtype; std::vector<size_t> shape; const char* data; size_t bytes; };

std::string contents(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(path.string() + ": cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

// `file` keeps the bytes that the tensors point into. Headers are as `make` writes them, without spaces.
std::map<std::string, Tensor> read(const fs::path& path, std::string& file) {
  file = contents(path);
  uint64_t size = 0;
  for (int i = 7; i >= 0; --i) size = size << 8 | static_cast<unsigned char>(file.at(i));
  const std::string header = file.substr(8, size);
  const std::regex entry(R"x("([^"]+)":\{"dtype":"(\w+)","shape":\[([\d,]*)\],"data_offsets":\[(\d+),(\d+)\]\})x");
  const std::regex number(R"(\d+)");
  std::map<std::string, Tensor> out;
  for (std::sregex_iterator it(header.begin(), header.end(), entry), end; it != end; ++it) {
    std::vector<size_t> shape;
    const std::string dims = (*it)[3];
    for (std::sregex_iterator n(dims.begin(), dims.end(), number); n != end; ++n) shape.push_back(std::stoul(n->str()));
    const size_t first = std::stoul((*it)[4]), last = std::stoul((*it)[5]);
    out[(*it)[1]] = {(*it)[2], shape, file.data() + 8 + size + first, last - first};
  }
  return out;
}

// BF16 is the upper half of a float's bits. Like the writer below, for a little-endian machine.
std::vector<float> floats(const Tensor& x) {
  if (x.dtype != "BF16") throw std::runtime_error("not BF16 but " + x.dtype);
  std::vector<float> out(x.bytes / 2);
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, x.data + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    std::memcpy(&out[i], &bits, 4);
  }
  return out;
}

std::vector<int32_t> ints(const Tensor& x) {
  if (x.dtype != "I32") throw std::runtime_error("not I32 but " + x.dtype);
  std::vector<int32_t> out(x.bytes / 4);
  std::memcpy(out.data(), x.data, x.bytes);
  return out;
}

struct Output { std::vector<size_t> shape; std::vector<float> numbers; };

void write(const fs::path& path, const std::map<std::string, Output>& outputs) {
  std::string header;
  size_t end = 0;
  for (const auto& [name, x] : outputs) {
    std::string shape;
    for (size_t size : x.shape) shape += (shape.empty() ? "" : ",") + std::to_string(size);
    const size_t first = end;
    end += 4 * x.numbers.size();
    header += (header.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"F32\",\"shape\":[" + shape +
              "],\"data_offsets\":[" + std::to_string(first) + "," + std::to_string(end) + "]}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  fs::create_directories(path.parent_path());
  std::ofstream stream(path, std::ios::binary);
  for (uint64_t size = header.size(), i = 0; i < 8; ++i) stream.put(static_cast<char>(size >> 8 * i));
  stream << header;
  for (const auto& [name, x] : outputs)
    stream.write(reinterpret_cast<const char*>(x.numbers.data()), 4 * x.numbers.size());
  if (!stream.flush()) throw std::runtime_error(path.string() + ": cannot be written");
}

struct Sizes { size_t B, T, N, H, S, K, J; int32_t block_size; };

// Attention of each query over the tokens of its blocks that it sees: q [B T N H], k, v [B S K H], blocks [B K T J]
// with -1 in unused slots, positions [B T], -1 for padding, lengths [B]; out [B T N H] and lse [B T N], 0 and -inf
// where a query sees nothing. NaN stands in what must not be read.
void attend(const Sizes& z, const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
            const std::vector<int32_t>& blocks, const std::vector<int32_t>& positions,
            const std::vector<int32_t>& lengths, std::vector<float>& out, std::vector<float>& lse) {
  out.assign(z.B * z.T * z.N * z.H, 0.0f);
  lse.assign(z.B * z.T * z.N, -std::numeric_limits<float>::infinity());
  const float scale = 1 / std::sqrt(static_cast<float>(z.H));
  for (size_t b = 0; b < z.B; ++b)
    for (size_t t = 0; t < z.T; ++t)
      for (size_t n = 0; n < z.N; ++n) {
        const int32_t position = positions[b * z.T + t];
        if (position < 0 || position >= lengths[b]) continue;
        const size_t head = n / (z.N / z.K), query = (b * z.T + t) * z.N + n;
        std::vector<size_t> keys;
        std::vector<float> scores;
        float highest = -std::numeric_limits<float>::infinity();
        for (size_t j = 0; j < z.J; ++j) {
          const int32_t block = blocks[((b * z.K + head) * z.T + t) * z.J + j];
          if (block < 0) continue;
          for (int32_t s = block * z.block_size; s < (block + 1) * z.block_size && s <= position; ++s) {
            const size_t key = ((b * z.S + s) * z.K + head) * z.H;
            float score = 0;
            for (size_t h = 0; h < z.H; ++h) score += q[query * z.H + h] * k[key + h];
            keys.push_back(key);
            scores.push_back(score * scale);
            highest = std::max(highest, scores.back());
          }
        }
        if (keys.empty()) continue;
        float total = 0;
        for (float& score : scores) total += score = std::exp(score - highest);
        for (size_t i = 0; i < keys.size(); ++i)
          for (size_t h = 0; h < z.H; ++h) out[query * z.H + h] += scores[i] / total * v[keys[i] + h];
        lse[query] = highest + std::log(total);
      }
}

int main(int count, char** arguments) try {
  if (count != 3) throw std::runtime_error(std::string("usage: ") + arguments[0] + " VECTORS MINE");
  const fs::path vectors = arguments[1], mine = arguments[2];
  const std::string manifest = contents(vectors / "manifest.json");
  // A case's entry begins with its group and file; its rule has the block's size. Tensors' names come after.
  const std::regex entry(R"x("file": "(sparse_attention/[^"]+)"[^{}]*"rule": \{[^}]*"block_size": (\d+))x");
  for (std::sregex_iterator it(manifest.begin(), manifest.end(), entry), end; it != end; ++it) {
    std::string file;
    auto x = read(vectors / it->str(1), file);
    const auto &q = x.at("q").shape, &k = x.at("k").shape;
    // A kernel that selects blocks itself takes index_q and index_k instead, and writes "blocks" as well.
    const Tensor& blocks = x.at(x.count("given_blocks") ? "given_blocks" : "blocks");
    const Sizes sizes{q[0], q[1], q[2], q[3], k[1], k[2], blocks.shape[3], std::stoi(it->str(2))};
    std::vector<float> out, lse;
    attend(sizes, floats(x.at("q")), floats(x.at("k")), floats(x.at("v")), ints(blocks), ints(x.at("positions")),
           ints(x.at("lengths")), out, lse);
    write(mine / it->str(1), {{"out", {q, out}}, {"lse", {{q[0], q[1], q[2]}, lse}}});
    std::printf("wrote %s\n", (mine / it->str(1)).c_str());
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "skeleton: error: %s\n", error.what());
  return 2;
}
