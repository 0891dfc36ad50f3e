"""What the tests of each suite prove, in words: the rows of the driver-by-capability matrix.

A test that stands in no row of its point's is a row by itself, called as the test is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Capability:
    """One row.

    Args:
        name: for people who choose a driver. "{}" stands for what the group of `given` found: a row for each.
        tests: the tests that prove it, without "test_", separated by spaces.
        given: a regular expression of their parameters, all of it; None: whatever they are, and none too.
    """

    name: str
    tests: str
    given: str | None = None

    def row(self, test: str) -> str | None:
        """The row's name where a test, e.g. "test_decode[float32]", belongs to it."""
        function, _, parameters = test.removesuffix("]").partition("[")
        if function.removeprefix("test_") not in self.tests.split():
            return None
        if self.given is None:
            return self.name
        found = re.fullmatch(self.given, parameters)
        return None if found is None else self.name.format(*found.groups())

    def names(self, row: str) -> bool:
        """Whether this is the name of such a row."""
        pattern = re.escape(self.name).replace(re.escape("{}"), ".+")
        return re.fullmatch(pattern, row) is not None


FORM = Capability(
    "a light card, options and methods as the interface says",
    "card_is_light card_is_sound card_answers_in_sentences body_has_the_interface operations_are_known "
    "constraints_are_known page_format",
)
"""The last row of every point."""


def row_of(point: str, test: str) -> str | None:
    """The row that a test belongs to; None for a figure, which proves nothing."""
    if test.startswith("test_figure"):
        return None
    for capability in (*CAPABILITIES.get(point, ()), FORM):
        if (row := capability.row(test)) is not None:
            return row
    return test.partition("[")[0].removeprefix("test_").replace("_", " ")


_LAYERS = "decode prefill mixed_rows"
_COLLECTIVES = "collective large_collective thorough_collective thorough_large_collective"
_JSON = (
    "what_fits_can_be_written nothing_else_can_be_written whatever_is_written_fits masks_and_matchers_agree "
    "accept_stops_where_it_must without_ends rows_of_masks"
)

CAPABILITIES: Mapping[str, tuple[Capability, ...]] = MappingProxyType(
    {
        "attention": (
            Capability("decode, prefill and both in one batch, {}", _LAYERS, "(.*)"),
            Capability("head size {}", "head_sizes", "(.*)"),
            Capability("multi-head, grouped-query and multi-query", "grouped_heads forms_of_one_kind"),
            Capability("block sizes from 1 to 128", "block_sizes blocks_of_smaller_groups"),
            Capability("long contexts, many rows", "long_rows many_rows"),
            Capability(
                "NaN that a query does not see has no effect on it",
                "what_some_queries_do_not_see what_some_queries_do_not_see_of_long_rows",
            ),
            Capability("ragged batches of any form", "ragged_batches"),
            Capability("sliding window", "sliding_window"),
            Capability("logits soft cap", "soft_cap soft_cap_in_a_window"),
            Capability("attention sinks", "sinks"),
            Capability("ALiBi", "alibi"),
            Capability("relative biases (T5)", "relative_bias encoder_with_relative_bias"),
            Capability("decoders' layers over an encoder (cross attention), {}", "cross", "(.*)"),
            Capability(
                "queries that are not contiguous (`kv_index`)", "kv_index what_lies_between_queries what_sees_nothing"
            ),
            Capability("bfloat16 KV cache under float32 queries", "narrower_cache"),
            Capability("fp8 KV cache", "fp8_cache what_some_queries_do_not_see_in_fp8"),
            Capability("int8 KV cache", "int8_cache what_some_queries_do_not_see_in_int8"),
            Capability(
                "KV cache of 8 bits with a scale for each token and head",
                "caches_with_scales thorough_caches_of_8_bits",
            ),
            Capability("large scores without overflow", "large_scores"),
            Capability("batch invariant: the same bits alone, in a batch, in chunks", "batch_invariant"),
            Capability("log-sum-exp on demand (`lse`)", "lse_puts_parts_together keys_on_several_ranks without_lse"),
            Capability("strided tensors, padded batches", "strided_tensors padding_rows padding_tokens"),
            Capability("keys and values read back (`read`)", "reading_back"),
            Capability("keys rotated where they are written (`write_rotated`)", "writing_rotated"),
            Capability("trees of drafts, {}", "trees_in_every_dtype", "(.*)"),
            Capability(
                "trees of drafts: any tree, windows, NaN that a node does not see",
                "trees largest_trees trees_with_everything what_nodes_do_not_see ragged_trees refilled_plan_of_trees "
                "nodes_that_are_rows_of_one_token",
            ),
            Capability("keys and values moved (`move`)", "moving"),
            Capability("plans refilled in place", "refilled_plan refilled_plan_of_prefills"),
            Capability("plans refilled for rows of any lengths", "refilled_plan_of_any_rows"),
            Capability("plans refilled by launches alone, for whole steps that are captured", "plans_by_launches"),
            Capability("lengths known as bounds only (steps in flight)", "lengths_that_are_bounded_only"),
            Capability("captured and replayed decode steps", "captured_step"),
            Capability("drafts padded to one length", "padded_drafts"),
            Capability("encoder layers (every token sees all), {}", "encoder", "(.*)"),
            Capability("encoder layers with soft cap, sinks and ALiBi", "encoder_with_everything"),
            Capability(
                "encoder layers with a sliding window to both sides",
                "encoder_with_window encoder_with_window_is_blind_beyond",
            ),
            Capability("encoder layers: NaN in a row has no effect on another", "encoder_rows_are_apart"),
            Capability("latent attention (MLA), {}", "latent_rows", "(.*)"),
            Capability(
                "latent attention: any sizes, heads and blocks",
                "latent_sizes latent_heads latent_block_sizes latent_forms_of_one_kind",
            ),
            Capability("latent attention: long contexts, many rows", "latent_long_and_many_rows"),
            Capability(
                "latent attention: NaN that a query does not see has no effect on it",
                "latent_what_some_queries_do_not_see latent_what_some_queries_do_not_see_of_long_rows",
            ),
            Capability("latent attention: ragged batches of any form", "latent_ragged_batches"),
            Capability(
                "latent attention: queries that are not contiguous (`kv_index`)",
                "latent_kv_index latent_what_lies_between_queries latent_what_sees_nothing",
            ),
            Capability("latent attention: bfloat16 cache under float32 queries", "latent_narrower_cache"),
            Capability("latent attention: fp8 (e4m3) cache", "latent_fp8_cache"),
            Capability(
                "latent attention: large scores, log-sum-exp on demand",
                "latent_large_scores latent_keys_on_several_ranks latent_without_lse",
            ),
            Capability(
                "latent attention: strided tensors, padded batches, bounded lengths",
                "latent_views latent_padding latent_lengths_that_are_bounded_only",
            ),
            Capability("latent attention: vectors read back (`read`)", "latent_reading_back"),
            Capability("latent attention: plans refilled in place", "latent_refilled_plan"),
            Capability("latent attention: plans refilled by launches alone", "latent_plans_by_launches"),
            Capability("latent attention: captured and replayed decode steps", "latent_captured_step"),
            Capability("latent attention: captured and replayed drafts", "latent_captured_drafts"),
            Capability("latent attention: drafts padded to one length", "latent_padded_drafts"),
            Capability("latent attention of DeepSeek's sizes", "thorough_latent_forms thorough_latent_ragged_batches"),
        ),
        "ops": (
            Capability("embedding, also of a rank's part", "embedding embedding_part"),
            Capability("gather rows", "gather_rows"),
            Capability("add", "add"),
            Capability("scale", "scale"),
            Capability("soft cap", "soft_cap"),
            Capability("RMS norm", "rms_norm rms_norm_of_large_numbers"),
            Capability("add and RMS norm", "add_rms_norm"),
            Capability("layer norm", "layer_norm"),
            Capability("rotary embedding", "rope rope_of_parts"),
            Capability("norms of queries and keys with rotary embedding", "qk_norm_rope"),
            Capability("SiLU and multiply", "silu_mul"),
            Capability("GELU and multiply", "gelu_mul"),
            Capability("GELU, exact and by tanh", "gelu"),
            Capability("ReLU and its square", "relu"),
            Capability("convolutions and scans of layers with states", "states"),
            Capability("the same in captured steps", "captured_states"),
            Capability("gates and norms beside them", "gated_norm gate_by join"),
            Capability("linear", "linear linear_of_a_view linear_keeps_rows_apart"),
            Capability("linear with what a layer has around it", "around_a_matrix"),
            Capability("linear, many widths by many rows", "thorough_linear"),
            Capability("a matrix of its own for each head", "linear_heads"),
            Capability("input preparation", "prepare_inputs place_tokens"),
            Capability("check of logits for NaN", "check_logits draw"),
            Capability("repetition, frequency and presence penalties", "penalties"),
            Capability("token masks", "mask_tokens"),
            Capability("grammar bitmasks", "apply_bitmask"),
            Capability(
                "greedy, temperature, top-k, top-p, min-p", "sample_is_as_defined ties tokens_have_the_distribution"
            ),
            Capability("the published random numbers (Philox)", "random_numbers_are_the_published_ones"),
            Capability(
                "rows sampled independently of their batch",
                "a_row_does_not_depend_on_the_others masked_rows a_row_that_is_not_a_number",
            ),
            Capability("log probabilities", "logprobs"),
            Capability("speculation: greedy verification", "verify"),
            Capability("speculation: trees of drafts", "verify_tree"),
            Capability("speculation: rejection sampling", "reject_is_as_defined tokens_have_the_targets_distribution"),
            Capability("mixtures of experts: routing", "router_logits route routing_what_is_no_number"),
            Capability("mixtures of experts: products and gates", "experts acts_of_experts gate"),
            Capability("mixtures of experts: some of them here", "experts_of_nobody places_of_experts"),
            Capability("mixtures of experts: a token among others", "an_experts_token_among_others"),
            Capability("adapters: products of many in one batch", "lora a_loras_token_among_others"),
            Capability("adapters in captured steps", "captured_lora"),
            Capability("captured and replayed: experts", "captured_experts"),
            Capability("captured and replayed: {}", "captured", r"(.*)-\w+"),
            Capability("batch invariant: linear", "invariant_linear"),
            Capability("batch invariant: norms, elements, draws", "invariant_norms invariant_elements invariant_draws"),
        ),
        "communicator": (
            Capability(
                "collective: {}", _COLLECTIVES + " thorough_collective thorough_large_collective", r"(.*?)(?:-\d+)?"
            ),
            Capability(
                "sums in {}, the same bits on every rank",
                "sums_are_near sums_have_the_same_bits_on_every_rank",
                r"(.*)-\d+",
            ),
            Capability("sums that are the same each time", "sums_are_the_same_each_time"),
            Capability(
                "batch invariant in {}: an element's sum in a tensor of any length", "batch_invariant", r"(.*)-\d+"
            ),
            Capability("many rounds, late ranks", "many_rounds thorough_rounds isend_waits_for_nobody"),
            Capability("empty tensors", "empty_tensors"),
            Capability("ranks agree on what is accepted", "accepts_is_equal_on_all_ranks"),
            Capability("16 MiB at once, whole", "a_message_of_16_mebibytes"),
            Capability(
                "a killed or closed rank is an error for the others, soon",
                "a_killed_rank_is_an_error_for_all_others a_killed_rank_is_an_error_for_those_who_wait_for_it "
                "a_closed_rank_has_gone",
            ),
            Capability("nothing left after the end", "close"),
        ),
        "evictor": (
            Capability(
                "only cached pages that nobody holds", "nothing_at_first what_is_held_stays victims_are_forgotten"
            ),
            Capability("a sequence is given up from its end", "the_end_of_a_sequence_goes_first"),
            Capability("order independent of how many are asked for", "one_by_one_or_all_at_once"),
            Capability("reset", "reset_forgets"),
            Capability("large pools, long histories", "many_turns_of_a_large_pool thousands_of_calls"),
            Capability("content that comes back, bounded memory", "what_comes_back memory_is_bounded"),
            Capability("any sequence of calls", "any_sequence_of_calls"),
            Capability(
                "reuses chunks that are no prefix",
                "chunks_in_another_order chunks_of_others_are_not_found reset_forgets_chunks "
                "memory_of_chunks_is_bounded",
            ),
            Capability(
                "retained pages last, by priority and time",
                "retained_pages_go_last retention_ends what_is_retained_is_found_and_held "
                "retention_ends_with_the_content any_retention",
            ),
        ),
        "drafter": (
            Capability(
                "drafts for batches of any size", "form something_is_drafted fewer_drafts_are_the_first_of_more"
            ),
            Capability(
                "the same drafts alone, in a batch and on every rank",
                "all_ranks_propose_the_same a_row_does_not_depend_on_the_others what_lies_past_the_tokens_is_not_read",
            ),
            Capability(
                "slots that change hands, and histories shared within a `cache_salt` alone",
                "requests_come_and_go histories_that_are_shared",
            ),
            Capability(
                "hidden states and draft models: drafts follow from the tokens", "drafts_follow_from_the_tokens"
            ),
            Capability(
                "draft probabilities, for rejection sampling",
                "probabilities_are_a_distribution drafts_are_drawn_from_their_probabilities "
                "what_is_accepted_has_the_targets_distribution",
            ),
            Capability("tokens of numpy, and no torch, beside another framework", "tokens_of_numpy"),
            Capability("drafts of passes that are captured with their draws", "drafts_of_captured_passes"),
        ),
        "grammar": (
            Capability("choice", _JSON, "choice-.*"),
            Capability("regex", _JSON, "regex-.*"),
            Capability("any JSON object (`json_object`)", _JSON, "json_object"),
            Capability("JSON schema: {}", _JSON, "json-(.*)"),
            Capability("JSON schema: {}", "schemas_hold", "(.*)"),
            Capability("rolls back over drafts", "rollback rollback_far"),
            Capability("tells what is forced, to be jumped over", "forced_bytes"),
            Capability("compiled by several threads", "compiled_by_several_threads"),
            Capability("vocabulary read when it is needed", "the_vocabulary_is_read_late"),
            Capability("closed with the engine", "it_can_be_closed"),
            Capability("what the vocabulary cannot spell is refused", "what_the_vocabulary_cannot_spell"),
        ),
        "scheduling_policy": (
            Capability("order of arrival among equals", "equals_go_in_order_of_arrival"),
            Capability("priorities", "urgent_requests_go_first"),
            Capability(
                "preempted requests go back to their place",
                "what_goes_back_is_next what_goes_back_goes_before_those_that_came_after",
            ),
            Capability("choice of whom to preempt", "victims"),
            Capability("cost flat in the queue's length", "cost_does_not_grow_with_the_queue"),
            Capability("any sequence of calls", "an_empty_queue any_sequence_of_calls"),
        ),
        "tool_parser": (
            Capability(
                "calls, one and several, with any arguments", "what_a_model_writes_is_read any_calls_in_any_pieces"
            ),
            Capability("in any pieces", "every_cut_tells_the_same"),
            Capability("told as they come, in order", "events_are_in_order arguments_are_told_as_they_come"),
            Capability(
                "nothing is lost",
                "plain_text_is_content a_call_cut_off_is_content nothing_is_lost_of_slips "
                "a_client_that_was_told_of_a_call_sees_the_rest",
            ),
            Capability("a form for grammars: required calls as the model writes them", "the_form_is_what_it_reads"),
            Capability("found by the chat template", "the_card_recognises_by_the_template"),
            Capability("streams of their own", "streams_know_nothing_of_each_other"),
            Capability("linear time", "no_text_costs_more_than_its_length"),
        ),
        "reasoning_parser": (
            Capability("thoughts that the prompt opens", "thoughts_that_the_prompt_opened where_thoughts_end"),
            Capability(
                "thoughts that the model opens", "thoughts_that_the_model_opens the_answer_is_not_read_for_marks"
            ),
            Capability("thoughts that the prompt closed", "thoughts_that_the_prompt_closed"),
            Capability("thoughts that do not end", "thoughts_that_do_not_end"),
            Capability("in any pieces", "any_text_in_any_pieces"),
            Capability("found by the chat template", "the_card_says_how_thoughts_are_marked"),
            Capability("streams of their own", "streams_know_nothing_of_each_other"),
            Capability("linear time", "no_text_costs_more_than_its_length"),
        ),
        "router": (
            Capability("living ranks only", "one_of_the_living"),
            Capability("idle ranks first, work spreads", "an_idle_rank_takes_what_is_new work_spreads"),
            Capability("ranks that come back", "a_rank_that_died_comes_back"),
            Capability("no chance involved", "the_same_calls_give_the_same_ranks"),
        ),
        "logits_processor": (
            Capability("the parameters' definition", "as_the_parameters_say who_uses_it"),
            Capability(
                "only the request's own rows", "rows_that_are_not_named_stay a_row_does_not_depend_on_the_others"
            ),
            Capability("several rows of a request (drafts)", "a_slot_in_several_rows"),
            Capability("slots that change hands", "a_slot_that_changes_hands"),
            Capability("steps in flight", "what_lies_past_the_tokens_is_not_read applied_twice_alike"),
            Capability("ids outside the vocabulary are refused", "ids_outside_the_vocabulary"),
        ),
        "executor": (
            Capability("1 worker", "start steps masks_that_follow calls", "1"),
            Capability("several workers (tensor parallel)", "start steps masks_that_follow calls", "[23]"),
            Capability("honest futures", "futures"),
            Capability("workers that are asked while they compute", "questions"),
            Capability("a worker that cannot start", "a_worker_that_cannot_start"),
            Capability(
                "steps that fail at their launch, when they are computed, and when they sample, on any rank",
                "a_step_that_raises a_step_that_fails_when_it_is_computed a_step_that_fails_when_it_samples",
            ),
            Capability(
                "workers that are killed, noticed at start, in a step and idle",
                "a_worker_that_is_killed a_worker_that_dies_idle a_worker_that_dies_at_start",
            ),
            Capability("workers that are stopped, noticed by whoever asks and whoever waits", "a_worker_that_stops"),
            Capability("workers whose parent is killed end", "orphans_go"),
            Capability("nothing left after the end", "after_shutdown"),
        ),
        "nodes": (
            Capability(
                "machines with names and addresses that stay", "machines_are_told_apart an_unknown_machine_is_refused"
            ),
            Capability("processes that hear and are heard", "what_is_started_hears_and_is_heard several_at_once"),
            Capability("no secret on a command line, private folders", "nobody_reads_what_it_was_told"),
            Capability("exit codes", "exit_codes_are_told"),
            Capability("processes that are killed or let go are gone", "what_is_killed_is_gone what_is_let_go_leaves"),
            Capability("processes whose parent has gone end, on another machine", "the_end_of_a_connection_ends_it"),
            Capability("nothing left after the end", "nothing_runs_on_when_it_is_closed"),
        ),
        "platform": (
            Capability("facts of the device, without torch", "facts facts_without_torch device"),
            Capability("memory pools", "pool pool_that_does_not_fit"),
            Capability("memory of the largest step measured at start", "profile"),
            Capability("copies to and from the device", "to_device to_host copies_in_a_row results_in_a_row"),
            Capability("buckets of captured steps", "buckets"),
            Capability(
                "captured and replayed steps are right",
                "capture what_is_not_captured what_cannot_be_captured a_value_that_was_kept",
            ),
            Capability("replays that skip padding", "rows_that_count"),
            Capability("decode steps as one launch, with their new pages and tokens", "whole_steps"),
        ),
        "quantization": (
            Capability("activations in {}", "linear", r"\w+-(.*)"),
            Capability("weights stored in {}", "stored_dtypes", "(.*)"),
            Capability("`{}` layers", "weights kinds", "(.*)"),
            Capability(
                "weights as near as the card says: any size, outliers, ends of the range, zeros",
                "sizes_of_weights outlying_weights ends_of_the_range zeros",
            ),
            Capability("wide layers do not overflow, or are refused", "wide_layers very_wide_layers"),
            Capability("tiny, huge and broken activations", "sizes_of_rows a_row_that_is_no_number"),
            Capability("rows independent of their batch", "a_row_does_not_depend_on_the_others"),
            Capability("rows rounded as norms and activations make them", "rows_rounded_as_they_are_made"),
            Capability("weights divided over ranks (tensor parallel)", "sharded_weights"),
            Capability("smaller than 16 bits a weight", "it_is_smaller"),
            Capability(
                "packed the same each time, and nothing else kept", "packing_is_the_same_each_time nothing_is_kept"
            ),
            Capability("many layers, strided tensors", "layers_are_apart strided_tensors"),
            Capability("what is no layer is refused", "what_is_no_layer"),
            Capability("captured and replayed steps, {}", "captured", "(.*)"),
            Capability("embeddings looked up as they are stored, captured too", "looked_up_rows captured_rows"),
            Capability(
                "weights that a checkpoint stores in its form",
                "what_is_claimed what_is_covered stored_layers other_dtypes_are_refused",
            ),
        ),
        "experts": (
            Capability("experts over 1 rank, {}", "as_a_loop_over_tokens", "(.*)-1"),
            Capability("divided over ranks, {}", "as_a_loop_over_tokens", "(.*)-[24]"),
            Capability("dealt over ranks, {}", "as_a_loop_over_tokens", "(.*)-[24] dealt"),
            Capability("dealt over engine cores, {}", "as_a_loop_over_tokens", "(.*)-2 cores.*"),
            Capability("all tokens to one expert", "one_expert_has_all_tokens"),
            Capability("each rank holds its share", "what_a_rank_holds"),
            Capability("inputs stay", "inputs_stay"),
            Capability("every tensor is asked for", "every_tensor_is_asked_for"),
            Capability("quantised experts", "quantised_experts"),
            Capability("what cannot be divided", "what_cannot_be_divided"),
            Capability("fewer tokens than planned", "fewer_tokens_than_planned"),
            Capability("tokens counted, experts moved", "what_is_done_beside_steps"),
        ),
        "adapter": (
            Capability("one adapter, over {} rank(s)", "as_weights_with_products", r"(\d)"),
            Capability("many in one step, over {} rank(s)", "many_in_one_step", r"(\d)"),
            Capability("requests without an adapter keep their bits", "who_has_none_stays_as_it_is"),
            Capability("padded steps", "rows_that_are_padded"),
            Capability("embeddings and heads", "both_ends"),
            Capability("more adapters than places", "places_change_hands another_revision"),
            Capability("others go on, nobody waits for ever", "others_go_on nobody_waits_for_ever any_order"),
            Capability("adapters that cannot be loaded", "what_does_not_fit files_that_are_gone"),
            Capability("loaded ahead, and unloaded", "loaded_ahead"),
        ),
        "kv_connector": (
            Capability("pages of {} bytes, out and back", "round_trip", "(.*)"),
            Capability("swapped pages of another framework", "pages_of_another_framework"),
            Capability("every dtype, bit by bit", "every_dtype"),
            Capability("order of pages, pages of several requests", "the_order_of_pages pages_that_two_requests_share"),
            Capability("partial loads", "partial_loads"),
            Capability("out and in within one step", "out_before_in nothing_to_do"),
            Capability("several ranks (tensor parallel)", "every_rank_keeps_its_own"),
            Capability(
                "a full tier refuses, and room comes back",
                "a_full_tier room_comes_back a_place_is_not_given_out_while_a_plan_reads_it",
            ),
            Capability("aborts in flight", "aborts"),
            Capability("steps in flight, any sequence of calls", "results_of_steps_in_flight any_sequence_of_calls"),
            Capability("failed loads are reported page by page", "failed_loads every_failed_load_is_reported"),
            Capability("memory that is not there is a typed error", "memory_that_is_not_there"),
            Capability("blocks are stored and found again, {} rank(s)", "what_was_computed_is_found", "(.*)"),
            Capability("stored pages of another framework", "blocks_of_another_framework"),
            Capability(
                "other blocks and other models are not found",
                "what_nobody_has_computed_is_not_found another_model_is_not_found",
            ),
            Capability("loads that are lost or aborted", "a_store_that_lost_what_it_had aborts_of_loads"),
            Capability("pages pulled from another engine, {} rank(s)", "another_engine_goes_on", "(.*)"),
            Capability("pages pushed to another engine, {} rank(s)", "pages_are_pushed", "(.*)"),
            Capability(
                "holds end, for who asked and of one's model",
                "what_another_engine_does_not_need nothing_is_held_for_nobody another_model_of_another_engine "
                "a_hold_that_runs_out",
            ),
            Capability("aborts on either side", "aborts_of_who_goes_on aborts_of_pushes"),
            Capability("another engine that dies", "the_other_engine_dies"),
            Capability("frames that are {}", "frames_in_trouble", "(.*)"),
            Capability("any sequence of handovers", "any_sequence_between_engines"),
            Capability("a scheduler half without torch", "the_scheduler_half_is_light"),
            Capability("nothing left after the end", "nothing_is_left nothing_is_left_between_engines"),
        ),
        "checkpoint": (
            Capability("names claimed and resolved", "claims files what_is_not_there pooler"),
            Capability("every tensor once, each time alike", "tensors"),
            Capability("bytes equal to the files'", "tensors_are_those_of_the_files"),
            Capability("truncated and missing files named", "a_truncated_file a_missing_file"),
        ),
        "model": (
            Capability("as transformers computes it", "as_transformers_computes_it"),
            Capability("other values of the config computed, or refused", "variants_of_the_config"),
            Capability(
                "config read whole, and refused by key",
                "spellings_of_the_config describe_is_pure describe_agrees_with_the_config a_config_that_makes_no_sense "
                "its_layers_are_those_described it_is_a_decoder it_is_an_encoder "
                "it_has_an_encoder",
            ),
            Capability(
                "every tensor of a checkpoint claimed once, others refused by name",
                "a_missing_tensor an_unexpected_tensor a_tensor_of_another_form a_tensor_that_comes_twice "
                "every_tensor_matters the_order_of_tensors weights_are_cast counts",
            ),
            Capability("computed in {}", "dtypes", "(.*)"),
            Capability("quantised layers and embeddings", "quantised_layers quantised_embedding"),
            Capability("prompts in chunks, token by token", "chunked_prefill decode later_tokens_have_no_influence"),
            Capability(
                "requests independent of each other and of padding",
                "nothing_is_kept_between_calls the_heads_take_any_rows ragged_batch padding "
                "inputs_of_encoders_are_apart",
            ),
            Capability(
                "every position that is described",
                "earlier_tokens_and_their_order_have_influence every_token_sees_all up_to_the_last_position "
                "what_the_encoder_reads_has_influence",
            ),
            Capability("token types", "token_types"),
            Capability("tensor parallel over {} ranks", "tensor_parallel divided", "(.*)"),
            Capability(
                "pipeline stages, listeners between layers",
                "the_walk_owns_the_layers the_walk_cuts_stages the_walk_selects_tokens wanted_rows",
            ),
            Capability("embeddings in place of tokens", "vectors_in_place_of_tokens"),
            Capability("operations alone, so that steps can be captured", "computes_through_operations_alone"),
        ),
        "tokenizer": (
            Capability("any Unicode text there and back", "round_trip ids empty"),
            Capability(
                "incremental decoding at every split",
                "streams_at_every_split half_a_character_is_held_back streams_behind_a_prompt streams_are_apart",
            ),
            Capability("incremental decoding of any ids", "streams_of_any_ids ids_that_nobody_knows"),
            Capability(
                "special tokens around a text and in it", "special_tokens_around_a_text special_tokens_in_a_text"
            ),
            Capability("pairs of texts", "pairs"),
            Capability("bytes of each token, for grammars", "vocabulary one_token longest_token"),
            Capability("the model's chat template", "the_models_own_template"),
            Capability(
                "templates of requests, in a sandbox",
                "a_template_of_the_request a_template_that_fails templates_stay_in_their_sandbox "
                "messages_as_clients_send_them",
            ),
            Capability("broken files and texts are typed errors", "broken_files text_that_is_no_unicode"),
            Capability("several threads", "threads"),
        ),
    }
)
"""By point, in the order of the page."""
