"""For tensors of 8 bits."""

cast_master_weights_to_fp8 = post_all_gather_processing = replace_raw_data = None
