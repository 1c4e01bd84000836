"""Table of Megatron-LM's flags that are not refused, in all supported versions.

* `PASSED_ON`: Megatron-LM's own code, which runs as it is, follows it. So it should do what it does
  there. That is no promise: tests run about a quarter of these flags.
* `DONE`: we do what it asks for in any case.
* `WITHOUT_EFFECT`: with `--distca` there is nothing that it could change, for the reason given.

Names are as on the command line, without the leading dashes and the `no-` or `disable-` that turns
a flag off. `*` stands for any ending. `tests/megatron_patches/flags/test_refused.py` finds flags of
a new version that stand neither here nor in `megatron_patches/flags/refused.py`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from megatron_patches.flags.refused import REFUSED, REFUSED_BY_OUR_ATTENTION, REFUSED_WITH_DISTCA

PASSED_ON = {
    "Sizes and kind of the model, which stays Megatron's own except for core attention": """
        num-layers encoder-num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels
        group-query-attention num-query-groups max-position-embeddings position-embedding-type
        use-rotary-position-embeddings rotary-base rotary-percent rotary-interleaved rope-type
        rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor no-rope-freq
        no-position-embedding make-vocab-size-divisible-by normalization norm-epsilon
        apply-layernorm-1p apply-residual-connection-post-layernorm qk-layernorm swiglu
        squared-relu quick-geglu openai-gelu glu-linear-offset activation-func-clamp-value
        disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights window-size
        window-attn-skip-freq softmax-type attention-output-gate use-mup mup-width-mult
        mup-base-hidden-size mup-embedding-mult mup-output-mult mup-base-head-dim
        mup-attn-scale-power multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim
        qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale mscale-all-dim
        fp32-residual-connection hidden-dropout attention-dropout spec mtp-num-layers
        mtp-loss-scaling-factor mtp-use-repeated-layer mtp-detach-heads
    """,
    "Initialization and random numbers": """
        seed data-parallel-random-init init-method-std embedding-init-method-std
        init-method-xavier-uniform no-initialization use-cpu-initialization te-rng-tracker
        inference-rng-tracker
    """,
    "Length of the run, and batches; samples are windows of --seq-length tokens": """
        micro-batch-size global-batch-size rampup-batch-size step-batch-size-schedule
        decrease-batch-size-if-needed train-iters train-samples seq-length encoder-seq-length
        exit-interval exit-duration-in-mins exit-signal exit-signal-handler
        exit-signal-handler-for-training eval-iters eval-interval eval-global-batch-size
        start-eval-at-iter iterations-to-skip result-rejected-tracker-filename skip-train test-mode
        empty-unused-memory-level
        manual-gc manual-gc-interval manual-gc-eval check-weight-hash-across-dp-replicas-interval
        train-sync-interval check-for-nan-in-loss-and-grad check-for-large-grads
        gpu-sniff-test-interval
    """,
    "Mixtures of experts; what is sent between experts' ranks is Megatron's own": """
        num-experts expert-model-parallel-size expert-tensor-parallel-size moe-*
        use-grouped-gemm-for-shared-expert use-fused-weighted-squared-relu
        high-priority-a2a-comm-stream save-tokens-per-expert-interval
    """,
    "Learning rate and optimizer, which get the same gradients": """
        lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-fraction lr-warmup-iters
        lr-warmup-samples lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples
        min-lr decoupled-lr decoupled-min-lr override-opt-param-scheduler
        override-opt_param-scheduler use-checkpoint-opt-param-scheduler
        use-checkpoint-opt_param-scheduler weight-decay weight-decay-incr-style start-weight-decay
        end-weight-decay no-weight-decay-cond-type apply-wd-to-qk-layernorm clip-grad optimizer
        adam-beta1 adam-beta2 adam-eps sgd-momentum muon-coefficient-type muon-extra-scale-factor
        muon-fp32-matmul-prec muon-momentum muon-nesterov muon-no-split-qkv muon-num-ns-steps
        muon-scalar-optimizer muon-scale-mode muon-tp-mode muon-use-nesterov lion-beta1 lion-beta2
        optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
        overlap-cpu-optimizer-d2h-h2d pin-cpu-grads pin-cpu-params dump-param-to-param-group-map
        use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype
        exp-avg-sq-dtype
    """,
    "Precision of all but core attention, which takes queries, keys and values as they come": """
        fp16 bf16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
        accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 fp16-lm-cross-entropy fp8-format
        fp8-recipe fp8-quantizer-factory fp8-margin fp8-interval fp8-amax-history-len
        fp8-amax-compute-algo fp8-wgrad fp8-param-gather fp8-output-proj fp4-format fp4-recipe
        fp4-quantizer-factory fp4-param-gather first-last-layers-bf16 num-layers-at-start-in-bf16
        num-layers-at-end-in-bf16 te-precision-config-file reuse-grad-buf-for-mxfp8-param-ag
        disable-bf16-reduced-precision-matmul
    """,
    "Fusions and recomputation of what surrounds core attention": """
        bias-gelu-fusion bias-swiglu-fusion bias-dropout-fusion rope-fusion masked-softmax-fusion
        gradient-accumulation-fusion persist-layer-norm cross-entropy-loss-fusion
        cross-entropy-fusion-impl fused-residual-rmsnorm jit-fuser
        clone-scatter-output-in-embedding recompute-granularity recompute-method
        recompute-num-layers recompute-modules recompute-activations distribute-saved-activations
        mlp-chunks-for-training
    """,
    "Tensor, sequence, pipeline and data parallelism": """
        tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size
        pipeline-model-parallel-comm-backend num-layers-per-virtual-pipeline-stage
        num-virtual-stages-per-pipeline-rank defer-embedding-wgrad-compute wgrad-deferral-limit
        use-ring-exchange-p2p tp-comm-overlap tp-comm-overlap-cfg tp-comm-bulk-wgrad
        tp-comm-bulk-dgrad tp-comm-overlap-ag tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
        tp-comm-split-ag tp-comm-split-rs tp-comm-bootstrap-backend use-distributed-optimizer
        num-distributed-optimizer-instances use-layer-wise-param-layout overlap-grad-reduce
        overlap-param-gather overlap-param-gather-with-optimizer-step align-grad-reduce
        align-param-gather ddp-num-buckets ddp-bucket-size ddp-pad-buckets-for-high-nccl-busbw
        ddp-reduce-scatter-with-fp32-accumulation ddp-average-in-collective
        ddp-param-name-patterns-for-fp32-local-accumulation gradient-reduce-div-fusion use-nccl-ub
        disable-symmetric-registration use-tp-pp-dp-mapping
    """,
    "Processes and their groups": """
        distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init
        local-rank nccl-communicator-config-path gloo-process-groups use-sharp sharp-enabled-group
        high-priority-stream-groups flight-recorder-dump-path flight-recorder-trace-buffer-size
        flight-recorder-dump-on-timeout flight-recorder-include-stack-trace
        flight-recorder-include-only-active flight-recorder-extra-dump-on-exec
    """,
    "Data, one blend or one for each split; conversations": """
        data-path split data-args-path train-data-path valid-data-path test-data-path
        per-split-data-args-path full-validation multiple-validation-sets validation-set-names
        sft sft-tokenizer-prompt-format
    """,
    "The tokenizer; data need only its number of tokens": """
        tokenizer-type tokenizer-model tokenizer-metadata tokenizer-special-tokens
        tokenizer-sentencepiece-legacy tokenizer-sentencepiece-ignore-extra-whitespaces
        tokenizer-hf-use-fast tokenizer-hf-no-use-fast tokenizer-hf-include-special-tokens
        tokenizer-hf-no-include-special-tokens vocab-size padded-vocab-size pad-vocab-size
        vocab-file merge-file tiktoken-num-special-tokens tiktoken-pattern tiktoken-special-tokens
        trust-remote-code null-tokenizer-eod-id null-tokenizer-pad-id chat-template
    """,
    "Checkpoints, which have nothing of --distca": """
        save save-interval persistent-save-interval save-retain-interval save-params-interval
        save-wgrads-interval load load-main-params-from-ckpt finetune pretrained-checkpoint
        ckpt-step ckpt-format ckpt-convert-format ckpt-convert-save
        ckpt-convert-update-legacy-dist-opt-format no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo
        ckpt-fully-parallel-save-process-group ckpt-fully-parallel-load-process-group
        ckpt-assume-constant-structure ckpt-load-validate-sharding-integrity
        auto-detect-ckpt-format use-checkpoint-args use-mp-args-from-checkpoint-args
        use-tokenizer-model-from-checkpoint-args exit-on-missing-checkpoint async-save
        async-strategy async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm
        use-persistent-ckpt-worker strict-fsdp-dtensor-load dist-ckpt-format dist-ckpt-workers
        dist-ckpt-strictness dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable
        use-dist-ckpt distrib-optim-fully-reshardable-mem-efficient non-persistent-save-interval
        non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir
        non-persistent-local-ckpt-algo replication replication-jump replication-factor
        verify-integrity save-optim save-rng load-optim load-rng stream-ckpt-dequant
        override-ckpt-iteration enable-msc disable-msc adlr-autoresume adlr-autoresume-interval
    """,
    "Logs and profiles of Megatron-LM's loop. Its throughput takes a sample for a document": """
        log-interval log-params-norm log-throughput log-progress log-timers-to-tensorboard
        log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
        log-memory-interval log-device-memory-used log-num-zeros-in-grad
        log-world-size-to-tensorboard log-energy logging-level timing-log-level timing-log-option
        barrier-with-level-1-timing tensorboard-dir tensorboard-log-interval tensorboard-queue-size
        wandb-project wandb-exp-name wandb-save-dir wandb-entity one-logger one-logger-project
        one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version profile
        profile-step-start profile-step-end profile-ranks use-pytorch-profiler
        pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack
        pytorch-profiler-collect-chakra record-memory-history record-shapes memory-snapshot-path
        nvtx-ranges config-logger-dir run-workload-inspector-server
    """,
    "Watching the job from outside, and breaking it": """
        log-straggler straggler-minmax-count straggler-ctrlr-port disable-straggler-on-startup
        enable-ft-package calc-ft-timeouts ft-num-warmup-iters fault-injector-ranks
        fault-injector-num-ranks fault-injector-fault-types fault-injector-fault-probabilities
        fault-injector-fault-delay fault-injector-delay-start-iteration fault-injector-mtti-seconds
        fault-injector-offset-seconds fault-injector-seed
    """,
    "A door to other flags": "enable-experimental",
}

DONE = {
    "Positions count from a document's start": "reset-position-ids",
    "Documents don't see each other": "reset-attention-mask dataloader-inter-document-masking",
    "A document's last token, which ends it, predicts nothing": "eod-mask-loss",
    "Masks are made of documents' lengths": "create-attention-mask-in-dataloader",
    "No token stands for padding": "allow-ambiguous-pad-tokens",
    "Losses are averaged over tokens": "calculate-per-token-loss",
    "Models are megatron-core's": "use-mcore-models",
    "GPUs run FlashAttention": "use-flash-attn",
    "Scores and softmax are float32": "attention-softmax-in-fp32 apply-query-key-layer-scaling",
}

WITHOUT_EFFECT = {
    "There is no DataLoader and no cache: a thread makes micro-batches ahead": """
        num-workers exit-signal-handler-for-dataloader data-cache-path object-storage-cache-path
        dataloader-fast-cache-load dataloader-defer-npy-index-mmap per-dataset-sequences-path
        num-dataset-builder-threads mid-level-dataset-surplus mmap-bin-files
    """,
    "Ticks have an order and messages of their own": """
        overlap-p2p-communication overlap-p2p-communication-warmup-flush
        microbatch-group-size-per-virtual-pipeline-stage scatter-gather-tensors-in-pipeline
        decoder-seq-length
    """,
    "Refines attention of other kinds, which is refused": """
        dsa-* linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim
        linear-num-key-heads linear-num-value-heads
        kitchen-attention-backend qk-clip-alpha qk-clip-threshold yarn-* mrope-section
        relative-attention-* mamba-*
    """,
    "Refines context parallelism, which is refused": """
        hierarchical-context-parallel-sizes max-seqlen-per-dp-cp-rank cp-comm-type
    """,
    "Refines layers of several kinds, which are refused": """
        mtp-hybrid-override-pattern mtp-standalone
    """,
    "Refines CUDA graphs, which are refused": """
        cuda-graph-warmup-steps cuda-graph-scope cuda-graph-modules
    """,
    "Refines fully sharded data parallelism, which is refused": """
        fsdp-* megatron-fsdp-* torch-fsdp2-* data-parallel-sharding-strategy
        outer-dp-sharding-strategy suggested-communication-unit-size keep-fp8-transpose-cache
        enable-full-sharding-in-hsdp init-model-with-meta-device create-all-gather-group
    """,
    "Refines offloading, which is refused": """
        offload-modules min-offloaded-tensor-size cpu-offloading-retain-pinned-cpu-buffers
        fine-grained-offloading-* delay-offload-until-cuda-graph
        delta-offload-bytes-across-pp-ranks activation-offload-fraction
    """,
    "Refines data that are refused": "fim-*",
    "Refines reinforcement learning, which is refused": """
        rl-* grpo-* langrl-env-config refit-method
    """,
    "Refines what is refused beside it": """
        logits-save-* logits-load-* error-injection-type inprocess-*
    """,
    "Generates text, which training doesn't": """
        inference-* flash-decode nccl-all-reduce-for-prefill symmetric-ar-type
        mlp-chunks-for-prefill use-legacy-static-engine enable-chunked-prefill
        num-speculative-tokens decode-only-cuda-graphs use-same-sampling-seed-across-dp-ranks
        max-tokens-to-oom
    """,
    "Belongs to models other than GPT, and to scripts of their own": """
        decoder-num-layers bert-* output-bert-embeddings onnx-safe mask-prob short-seq-prob
        sample-rate vocab-extra-ids ict-* biencoder-* titles-data-path query-in-block-prob
        use-one-sent-docs evidence-data-path retriever-* block-data-path embedding-path indexer-*
        num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction
        data-sharding head-lr-mult vision-* swin-backbone-type mask-type mask-factor iter-per-epoch
        dino-* is-hybrid-model
    """,
    "Megatron-LM itself refuses or ignores it": """
        batch-size warmup model-parallel-size checkpoint-activations ckpt-fully-parallel-save
    """,
}


@cache
def all_names() -> dict[str, list[tuple[str, str]]]:
    """Returns what becomes of each name, and why, as often as it stands in a table."""
    found: dict[str, list[tuple[str, str]]] = {}
    tables = {"passed on": PASSED_ON, "done": DONE, "without effect": WITHOUT_EFFECT}
    for kind, table in tables.items():
        for why, names in table.items():
            for name in names.split():
                found.setdefault(name, []).append((kind, why))
    for refused in (*REFUSED, *REFUSED_BY_OUR_ATTENTION, *REFUSED_WITH_DISTCA):
        for name, _ in refused.flags():
            found.setdefault(name, []).append(("refused", refused.what))
    return found


def what_becomes_of(option: str) -> tuple[str, str] | None:
    """Returns what becomes of an option of Megatron-LM, and why; None: it is in no table."""
    name = option.removeprefix("--")
    candidates = [name, name.removeprefix("no-"), name.removeprefix("disable-")]
    # A name with `*` takes what no other names.
    for matches in (str.__eq__, fnmatchcase):
        for candidate in candidates:
            for each, (what, *_) in all_names().items():
                if matches(candidate, each):
                    return what
    return None
