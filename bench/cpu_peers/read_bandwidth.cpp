// A plain read as one side of bench/cpu.py's rounds (rounds.py describes the protocol): a step of "decode" reads as many
// bytes as a token's weights have, once, by as many threads as the engines have. What it reaches is the ceiling of one
// stream on this machine in this minute.
//
//     c++ -O3 -march=native -std=c++17 -pthread read_bandwidth.cpp -o read-bandwidth
//     read-bandwidth BYTES THREADS
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace {

// A cache line.
typedef std::uint64_t Line __attribute__((vector_size(64)));
constexpr std::size_t kPiece = 256 << 10, kHugePage = 2 << 20, kAhead = 4096;

[[gnu::noinline]] Line read(const char * from, std::size_t bytes) {
    Line sums[4] = {};
    const Line * lines = reinterpret_cast<const Line *>(from);
    for (std::size_t at = 0; at < bytes / sizeof(Line); at += 4) {
        for (int each = 0; each < 4; each++) {
            __builtin_prefetch(reinterpret_cast<const char *>(lines + at + each) + kAhead);
            sums[each] += lines[at + each];
        }
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

class Readers {
public:
    Readers(std::size_t bytes, int threads) : threads_(threads), pieces_((bytes + kPiece - 1) / kPiece) {
        const std::size_t whole = (pieces_ * kPiece + kHugePage - 1) / kHugePage * kHugePage;
        void * place = mmap(nullptr, whole + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (place == MAP_FAILED) {
            std::perror("mmap");
            std::exit(1);
        }
        const auto address = reinterpret_cast<std::uintptr_t>(place);
        data_ = reinterpret_cast<char *>((address + kHugePage - 1) / kHugePage * kHugePage);
        madvise(data_, whole, MADV_HUGEPAGE);
        std::memset(data_, 1, pieces_ * kPiece);
    }

    // Seconds for so many passes, between which the threads meet, as an engine's do.
    double run(int passes) {
        next_ = 0;
        arrived_ = 0;
        const auto began = std::chrono::steady_clock::now();
        std::vector<std::thread> others;
        for (int each = 1; each < threads_; each++) {
            others.emplace_back([this, passes] { work(passes); });
        }
        work(passes);
        for (auto & other : others) {
            other.join();
        }
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    }

private:
    void work(int passes) {
        Line sum = {};
        for (int pass = 0; pass < passes; pass++) {
            // Each pass has numbers of its own, so that the counter is never reset.
            const std::size_t first = pass * (pieces_ + threads_);
            for (std::size_t piece; (piece = next_.fetch_add(1) - first) < pieces_;) {
                sum += read(data_ + piece * kPiece, kPiece);
            }
            arrived_.fetch_add(1);
            while (arrived_.load() < (pass + 1) * threads_) {
                std::this_thread::yield();
            }
        }
        sink_.fetch_add(sum[0]);
    }

    int threads_;
    std::size_t pieces_;
    char * data_;
    std::atomic<std::size_t> next_{0};
    std::atomic<int> arrived_{0};
    std::atomic<std::uint64_t> sink_{0};
};

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        std::cerr << "usage: read-bandwidth BYTES THREADS\n";
        return 2;
    }
    Readers readers(std::strtoull(argv[1], nullptr, 10), std::atoi(argv[2]));
    std::printf("{\"about\": \"plain read\"}\n");
    std::fflush(stdout);
    std::string task;
    int streams = 0, steps = 0;
    while (std::cin >> task >> streams >> steps && task == "decode") {
        std::printf("{\"seconds\": %.9f}\n", readers.run(steps));
        std::fflush(stdout);
    }
}
