// llama.cpp as one side of bench/cpu.py's rounds (rounds.py describes the protocol). Computes what llama-batched-bench
// does, by the same calls and with its defaults, but stays loaded between measurements.
//
//     llama-turns MODEL THREADS STREAMS PROMPTS TOKENS MOST_STEPS
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "llama.h"

namespace {

std::string about;

// Keeps what says where weights went (AMX, CPU_REPACK, …); passes warnings on.
void on_log(ggml_log_level level, const char * text, void *) {
    const std::string line(text);
    if (line.find("model buffer size") != std::string::npos) {
        const auto from = line.find_first_not_of(' ', line.find(':') + 1);
        about += (about.empty() ? "" : "; ") + line.substr(from, line.find_last_not_of('\n') + 1 - from);
    }
    if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
        std::cerr << line;
    }
}

[[noreturn]] void fail(const char * what) {
    std::cerr << what << '\n';
    std::exit(1);
}

struct Engine {
    llama_context * context;
    llama_memory_t memory;
    llama_batch batch;
    int vocabulary;

    void add(int position, int sequence, bool wanted) {
        const int at = batch.n_tokens++;
        batch.token[at] = std::rand() % vocabulary;
        batch.pos[at] = position;
        batch.n_seq_id[at] = 1;
        batch.seq_id[at][0] = sequence;
        batch.logits[at] = wanted;
    }

    // Computes the batch in parts of the context's size, and empties it.
    void compute() {
        const int most = static_cast<int>(llama_n_batch(context));
        for (int at = 0; at < batch.n_tokens; at += most) {
            llama_batch part = {
                std::min(most, batch.n_tokens - at), batch.token + at,  nullptr,
                batch.pos + at, batch.n_seq_id + at, batch.seq_id + at, batch.logits + at,
            };
            if (llama_decode(context, part) != 0) {
                fail("llama_decode failed");
            }
        }
        llama_synchronize(context);
        batch.n_tokens = 0;
    }

    void prefill(int first, int prompts, int tokens) {
        for (int prompt = 0; prompt < prompts; prompt++) {
            for (int at = 0; at < tokens; at++) {
                add(at, first + prompt, at == tokens - 1);
            }
        }
        compute();
    }
};

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 7) {
        fail("usage: llama-turns MODEL THREADS STREAMS PROMPTS TOKENS MOST_STEPS");
    }
    const int threads = std::atoi(argv[2]), streams = std::atoi(argv[3]), prompts = std::atoi(argv[4]);
    const int tokens = std::atoi(argv[5]), most_steps = std::atoi(argv[6]);
    llama_log_set(on_log, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == nullptr) {
        fail("cannot load the model");
    }
    llama_context_params params = llama_context_default_params();
    params.n_threads = params.n_threads_batch = threads;
    params.n_seq_max = streams + prompts;
    params.n_ctx = (streams + prompts) * (tokens + most_steps);
    params.n_batch = 2048;
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        fail("cannot make a context");
    }
    Engine engine = {
        context,
        llama_get_memory(context),
        llama_batch_init((streams + prompts) * tokens, 0, 1),
        llama_vocab_n_tokens(llama_model_get_vocab(model)),
    };
    engine.prefill(0, streams, tokens);
    std::printf("{\"about\": \"%s; %s\"}\n", about.c_str(), llama_print_system_info());
    std::fflush(stdout);

    std::string task;
    while (std::cin >> task) {
        int number = 0, steps = 0;
        double began = 0, took = 0;
        if (task == "prefill" && std::cin >> number) {
            began = seconds();
            engine.prefill(streams, number, tokens);
            took = seconds() - began;
            for (int prompt = 0; prompt < number; prompt++) {
                llama_memory_seq_rm(engine.memory, streams + prompt, -1, -1);
            }
        } else if (task == "decode" && std::cin >> number >> steps) {
            began = seconds();
            for (int step = 0; step < steps; step++) {
                for (int stream = 0; stream < number; stream++) {
                    engine.add(tokens + step, stream, true);
                }
                engine.compute();
            }
            took = seconds() - began;
            bool back = true;
            for (int stream = 0; stream < number; stream++) {
                back = llama_memory_seq_rm(engine.memory, stream, tokens, -1) && back;
            }
            if (!back) {
                // A recurrent state cannot go back.
                for (int stream = 0; stream < number; stream++) {
                    llama_memory_seq_rm(engine.memory, stream, -1, -1);
                }
                engine.prefill(0, number, tokens);
            }
        } else {
            fail("unknown task");
        }
        std::printf("{\"seconds\": %.9f}\n", took);
        std::fflush(stdout);
    }
    llama_batch_free(engine.batch);
    llama_free(context);
    llama_model_free(model);
}
