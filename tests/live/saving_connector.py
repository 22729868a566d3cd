from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_compat.kv_connector import KVConnectorBase, KVConnectorMetadata


@dataclass
class Work(KVConnectorMetadata):  # what the scheduler's side asks of the worker in a step
    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)


class SavingConnector(KVConnectorBase):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = Path(self.kv_transfer_config.get_from_extra_config("folder", "kv"))
        self.work, self.saved = Work(), set()

    def whole_blocks(self, request):  # of a prompt, whose last token is always computed: file, blocks, tokens
        size = self.vllm_config.cache_config.block_size
        tokens = tuple(request.prompt_token_ids[: (request.num_prompt_tokens - 1) // size * size])
        return self.folder / f"{hash(tokens)}.pt", len(tokens) // size, len(tokens)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        file, _, tokens = self.whole_blocks(request)
        return max(0, tokens - num_computed_tokens) if file.exists() else 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            file, count, _ = self.whole_blocks(request)
            self.work.loads.append((file, blocks.get_block_ids()[0][:count]))

    def request_finished(self, request, block_ids):
        file, count, tokens = self.whole_blocks(request)
        if not count or request.num_computed_tokens < tokens or file.exists():
            return False, None
        self.work.saves.append((file, block_ids[:count], request.request_id))
        return True, None  # its blocks stay until get_finished has named the request

    def build_connector_meta(self, scheduler_output):
        work, self.work = self.work, Work()
        return work

    def register_kv_caches(self, kv_caches):  # from here on in the worker
        self.layers = kv_caches

    def start_load_kv(self, forward_context):
        for file, block_ids in self._get_connector_metadata().loads:
            for name, blocks in torch.load(file).items():
                self.by_block(self.layers[name])[block_ids] = blocks.to(self.layers[name].device)

    def wait_for_save(self):
        for file, block_ids, request_id in self._get_connector_metadata().saves:
            torch.save({name: self.by_block(layer)[block_ids].cpu() for name, layer in self.layers.items()}, file)
            self.saved.add(request_id)

    def get_finished(self, finished_req_ids):
        saved, self.saved = self.saved, set()
        return saved, None

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata): ...
