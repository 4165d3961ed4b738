"""Names of kernels as public traces, issues and sources hold them; template arguments are cut to X."""

from __future__ import annotations

# fmt: off
FORWARD = (
    "void fmha_fwd_loop_kernel<FMHA_kernel_traits<256, 64, 16, 1, 4, 8u, __half>, true, false, false>(FMHA_fpr"
    "op_params)",
    "void fmha_fprop_fp16_512_64_sm80_kernel<true>(Fused_multihead_attention_fprop_params)",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>, false,"
    " true, false, true, false>(Flash_fwd_params)",
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, cutlass::bflo"
    "at16_t, Flash_kernel_traits<128, 64, 128, 4, cutlass::bfloat16_t> >, true, false, false, false, true, fal"
    "se, true, false>(flash::Flash_fwd_params)",
    "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>, 4, 6, true>(flash:"
    ":Flash_fwd_params)",
    "void cutlass::device_kernel<flash::enable_sm80_to_sm89<flash::FlashAttnFwdSm80<flash::CollectiveMainloopF"
    "wdSm80<4, 1, false, cute::tuple<cute::C<128>, cute::C<64>, cute::C<128> > > > > >(Params)",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop"
    "FwdSm90<2, cute::tuple<cute::C<1>>>>>>(Params)",
    "kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm100_object_at__tensor0000o111213",
    "void attention_kernel_batched_impl<AttentionKernel<cutlass::half_t, cutlass::arch::Sm80, true, 64, 64, 64"
    ", true, true> >(AttentionKernel<>::Params)",
    "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaFwdKernelTmaWarpspecialized<cute::tuple<int>,"
    " cutlass::fmha::collective::Sm100FmhaFwdMainloopTmaWarpspecialized<cutlass::bfloat16_t>, cutlass::gemm::c"
    "ollective::X>>(Params)",
    "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<cute::tuple<cute:"
    ":C<128>>, cutlass::gemm::Z>>(Params)",
    "void cutlass::device_kernel<cutlass::fmha::kernel::FmhaKernelTmaWarpSpecialized<cutlass::gemm::KernelTma>"
    ">(Params)",
    "void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8, cutlass::bfloat16_t, 512>, "
    "false, flash::SharedStorageMLA<>>(Flash_fwd_mla_params)",
    "void sm90::dense::flash_fwd_splitkv_mla_kernel<sm90::dense::Traits<cutlass::bfloat16_t>>(Params)",
    "void smxx::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512, 8, 32, 256>(Params)",
    "void flash_fwd_splitkv_mla_combine_kernel<cutlass::bfloat16_t, float, long, 512, 32>(X)",
    "void sm90::fwd::sparse_attn_fwd_kernel<sm90::fwd::KernelTemplate<576, true>>(X)",
    "void sm100::fwd::head128::sparse_attn_fwd_kernel<X>(X)",
    "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_f16_knob_3_64x64x128_4x1x1_kernel0_0",
    "cudnn_generated_fort_native_sdpa_sm100_flash_fprop_f16_knob_31_128x128x128_1x1x1_cga1x1x1_kernel0_0",
    "fmha_v2_flash_attention_bf16_64_128_S_q_k_v_128_causal_tma_ws_sm90_kernel",
    "fmha_v2_flash_attention_fp16_S_128_D_sm80_kernel",
    "attn_fwd.kd",
    "_ZN7ck_tile6kentryILi256ELi2ENS_13FmhaFwdKernelINS_33BlockFmhaPipelineQRKSVSAsyncEEEEEvDpT_",
    "void ck_tile::kentry<ck_tile::gfx9_t, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync<X>>"
    ">(Kargs)",
    "_ZN7ck_tile6kentryILi2ENS_25FmhaFwdSplitKVCombineKernelIX",
    "void ck::kernel_batched_gemm_softmax_gemm_xdl_cshuffle_v1<ck::GridwiseBatchedGemmSoftmaxGemm_Xdl_CShuffle"
    "<X>>(X)",
    "void ck::kernel_grouped_gemm_softmax_gemm_xdl_cshuffle_v1<X>(X)",
    "_ZN5aiter36fmha_fwd_hd128_bf16_causal_rtna_groupE",
    "aiter::mla_dec_stage1_bf16_a16w16_subQ16_mqa16",
    "mla_a8w8_qh16_qseqlen1_gqaratio16_ps",
    "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps",
    "_ZN5aiter19mla_pfl_bf16_a16w16E",
    "void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16, __hip_bfloat16, 0, 16, 128, 256>(X)",
    "void paged_attention_ll4mi_reduce_kernel<__hip_bfloat16, 128, 128, 256, 8>(X)",
    "void vllm::paged_attention_v1_kernel<unsigned short, unsigned short, 128, 16, 128, (vllm::Fp8KVCacheDataT"
    "ype)0, false>(X)",
    "void vllm::paged_attention_v2_reduce_kernel<unsigned short, 128, 128, 512>(X)",
    "kernel_unified_attention_2d",
    "kernel_unified_attention_3d",
    "kernel_paged_attention_2d",
    "void vllm::merge_attn_states_kernel<__nv_bfloat16, 128>(X)",
    "_fwd_grouped_kernel_stage1",
    "_fwd_kernel_stage1",
    "_fwd_kernel_stage2",
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<X>>(X)",
    "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<X>(X)",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<X>(X)",
    "void flashinfer::SinglePrefillWithKVCacheKernel<X>(X)",
    "void flashinfer::SingleDecodeWithKVCacheKernel<X>(X)",
    "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<X>>(X)",
    "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, __nv_bfloat16>(X)",
    "void flashinfer::mla::BatchMLAPagedAttentionKernel<X>(X)",
    "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<X>(X)",
    "fmhaSm100aKernel_QkvE4m3OBfloat16H128PagedKvCausalP64VarSeqQ128Kv128PersistentContext",
    "fmhaSm100fKernel_QkvBfloat16OBfloat16HQk576HV512HVPerCta256PagedKvDenseP64MultiCtasKvVarSeqQ16Kv128Static"
    "KeepsAbForGen",
    "void tensorrt_llm::kernels::mmha::masked_multihead_attention_kernel<unsigned short, 128, 16>(X)",
    "qk_int8_sv_f16_accum_f32_attn_kernel",
    "void qk_int8_sv_f8_accum_f32_attn_kernel<128, 64, 32>(X)",
    "triton_tem_fused_flex_attention_0",
    "parallel_attn_fwd_kernel",
    "micro_sdpa",
    "void natten::cuda::fna::NeighborhoodAttentionForward<X>",
)
BACKWARD = (
    "void fmha_bwd_dq_dk_dv_loop_kernel<FMHA_kernel_traits<128, 64, 16, 1, 8, 8u, __half>, true, false, -1>(FM"
    "HA_dgrad_params)",
    "void fmha_bwd_dot_do_o_kernel<FMHA_kernel_traits<128, 64, 16, 1, 8, 8u, __half> >(FMHA_dgrad_params)",
    "void fmha_dgrad_fp16_512_64_sm80_kernel(Fused_multihead_attention_fprop_params)",
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 2, 4, 2"
    ", false, false, cutlass::bfloat16_t> >",
    "void cutlass::device_kernel<flash::enable_sm80_to_sm89<flash::FlashAttnBwdSm80<flash::CollectiveMainloopB"
    "wdSm80<2, 2>>>>(Params)",
    "fmha_cutlassB_f16_aligned_128x64_k64_dropout_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass"
    "::arch::Sm80, cutlass::half_t>::Params)",
    "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaBwdKernelTmaWarpSpecialized<cute::tuple<int>,"
    " cutlass::gemm::X>>(Params)",
    "cudnn_generated_fort_native_sdpa_sm80_flash_bprop_f16_knob_3_64x64x128_4x1x1_kernel0_0",
    "bwd_kernel_dk_dv.kd",
    "bwd_preprocess.kd",
    "bwd_kernel_dk_dv_dq",
    "_bwd_kernel_dkdvdq_causal",
    "void ck_tile::kentry<ck_tile::gfx9_t, 1, ck_tile::FmhaBwdDQDKDVKernel<X>>(Kargs)",
    "void ck_tile::kentry<ck_tile::gfx9_t, 1, ck_tile::FmhaBwdOGradDotOKernel<X>>(Kargs)",
    "_ZN5aiter30fmha_bwd_hd128_bf16_a32_rtne_pE",
    "_ZN5aiter24fmha_bwd_hd128_odo_bf16E",
    "triton_tem_fused_flex_attention_backward_zeros_1",
    "triton_tem_fused__to_copy_flex_attention_backward_view_3",
    "triton_per_fused_flex_attention_backward_0",
    "triton_red_fused__to_copy_flex_attention_backward_view_2",
    "parallel_attn_bwd_kernel_dkv",
)
CONVOLUTIONS = (
    "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_warpsize2x2x1_g1_"
    "tensor16x8x16_execute_kernel__5x_cudnn",
    "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_ex"
    "ecute_segment_k_off_kernel__5x_cudnn",
    "sm80_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_x",
    "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_x",
    "volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
    "turing_fp16_s1688cudnn_fp16_128x64_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
    "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(X)",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop_optimized_f16_128x64_32x4_nhwc_align8>(X)",
    "cudnn_generated_fort_native_conv_sm90_fprop_x",
    "miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_edc_stride1",
    "igemm_fwd_gtcx3_nhwc_fp16_bx0_ex1_bt256x128x32",
    "_ZN2ck16tensor_operation6device12_GLOBAL__N_137kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffleINS_X",
    "void conv2d_c1_k1_nchw_hw_packed_kernel<float, float, 3>(X)",
)
# Nothing of these is attention or the softmax of one.
OTHERS = (
    "void vllm::moe::topkGatingSoftmax<4, 64, 4, 16, int>(float const*, bool const*, float*, int, int*, int*, "
    "int, int, int)",
    "void flashinfer::sampling::OnlineSoftmaxMapKernel<256u, 4u>(float*, X)",
    "void flashinfer::sampling::TopPSamplingFromProbKernel<X>",
    "void moeSoftmax<256>(X)",
    "topk_softmax_kernel",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(X)",
    "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16>(X)",
    "set_mla_kv_buffer_kernel",
    "concat_and_cast_mha_k_kernel",
    "_qk_rope_cat_and_cache_kernel",
    "_ZN5aiter45fused_qk_rope_concat_and_cache_mla_kernelE",
    "void flashinfer::AppendPagedKVCacheKernel<X>",
    "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<X>(X)",
    "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(X)",
    "fused_moe_kernel",
    "void moe::moe_align_block_size_kernel<int>(X)",
    "_moe_gemm_kernel",
    "void fused_add_rms_norm_kernel<c10::BFloat16, 8>(X)",
    "fused_add_rmsnorm_kernel",
    "triton_per_fused_expand_native_layer_norm_0",
    "triton_red_fused__log_softmax_nll_loss_forward_2",
    "triton_red_fused_logsumexp_0",
    "triton_per_fused_exp_log_sum_sub_0",
    "triton_poi_fused_exp_neg_0",
    "triton_per_fused_expand_sum_3",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, true, false>(float*, float const"
    "*, int, int, int, bool const*, int, bool)",
    "void (anonymous namespace)::softmax_warp_backward<float, float, float, 7, true, false>(float*, X)",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_fwd_kernel_o",
    "fused_recurrent_gated_delta_rule_fwd_kernel",
    "_fwd_kv_parallel",
    "chunk_linear_attn_fwd_kernel",
    "_fwd_kernel",
    "_bwd_kernel",
    "fp8_paged_mqa_logits_kernel",
    "get_mla_metadata",
    "cross_entropy_kernel",
    "liger_cross_entropy_kernel",
    "void nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
    "void cunn_SpatialSoftMaxForward<float, float, float, int, LogSoftMaxForwardEpilogue>(X)",
    "rocblas_gemvt_kernel",
    "wvSplitK_hf_sml_",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<X>",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168u>",
    "void marlin::Marlin<X>",
)
# fmt: on
