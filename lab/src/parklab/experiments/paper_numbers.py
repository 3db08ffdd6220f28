"""The numbers that the paper prints, as it prints them, by label. A record of what was claimed elsewhere: nothing
computes with it.

Group names that a table prints once stand in every row of the group.
"""

from __future__ import annotations

from typing import NamedTuple


class PrintedTable(NamedTuple):
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def printed(caption: str, text: str) -> PrintedTable:
    """Lines of values with " | " between them; the first one names the columns."""
    columns, *rows = (tuple(line.strip().split(" | ")) for line in text.strip().splitlines())
    return PrintedTable(caption, columns, tuple(rows))


# every table and figure, in the paper's order
LABELS = (
    "fig:retrieval_mismatches", "tab:query_key_compression", "fig:overview", "tab:main_quality_efficiency",
    "tab:module_ablation", "fig:generation_example", "fig:mismatch_errors_appendix", "tab:query_representation_errors",
    "tab:key_score_errors", "fig:qrkc_effect", "tab:pama_kernel_overhead", "fig:qrkc_breakdown",
    "tab:centroid_count_sensitivity_hy", "tab:centroid_count_sensitivity_wan", "tab:reuse_schedule_hy",
    "fig:quality_efficiency_curve", "tab:query_key_compression_topk", "fig:video_vis_hunyuanvideo",
    "fig:video_vis_wan2.1", "fig:video_vis_wan2.1-1.3B", "fig:video_vis_wan2.2",
)  # fmt: skip
PAPER: dict[str, PrintedTable] = {
    "tab:query_key_compression": printed(
        "Top-p block-retrieval recall (p = 0.9) in percent, by what represents queries and keys",
        """
        Ordering | Query | Key | HunyuanVideo Mean | HunyuanVideo P05 | HunyuanVideo Worst | Wan 2.1-14B Mean | Wan 2.1-14B P05 | Wan 2.1-14B Worst
        Clustered | Full | Full | 91.29 | 90.02 | 90.01 | 91.71 | 90.02 | 90.01
        Clustered | Centroid | Centroid | 88.06 | 81.53 | 64.21 | 90.43 | 87.11 | 73.89
        Clustered | Centroid | Full | 89.10 | 84.44 | 68.40 | 91.00 | 88.64 | 79.06
        Clustered | Full | Centroid | 90.70 | 87.62 | 81.64 | 91.56 | 89.36 | 83.61
        Original | Full | Full | 90.64 | 90.02 | 90.01 | 90.89 | 90.03 | 90.02
        Original | Centroid | Centroid | 85.59 | 72.40 | 22.94 | 90.01 | 83.96 | 69.11
        Original | Centroid | Full | 86.18 | 56.17 | 15.02 | 89.24 | 74.92 | 39.94
        Original | Full | Centroid | 87.80 | 76.35 | 24.30 | 91.32 | 87.02 | 73.55""",
    ),
    "tab:query_key_compression_topk": printed(
        "Top-k block-retrieval recall (10 % of the key blocks) in percent",
        """
        Ordering | Query | Key | HunyuanVideo Mean | HunyuanVideo P05 | HunyuanVideo Worst | Wan 2.1-14B Mean | Wan 2.1-14B P05 | Wan 2.1-14B Worst
        Clustered | Full | Full | 77.05 | 27.41 | 18.97 | 73.48 | 32.81 | 19.66
        Clustered | Centroid | Centroid | 75.37 | 27.27 | 18.96 | 72.35 | 32.78 | 19.66
        Clustered | Centroid | Full | 76.14 | 27.38 | 18.96 | 72.88 | 32.80 | 19.66
        Clustered | Full | Centroid | 76.50 | 27.29 | 18.96 | 73.12 | 32.79 | 19.66
        Original | Full | Full | 61.90 | 18.93 | 12.73 | 56.49 | 21.17 | 10.51
        Original | Centroid | Centroid | 56.78 | 17.56 | 08.46 | 54.78 | 20.52 | 10.51
        Original | Centroid | Full | 56.91 | 18.91 | 12.72 | 53.17 | 21.13 | 10.51
        Original | Full | Centroid | 56.94 | 17.49 | 08.59 | 54.84 | 20.66 | 10.51""",
    ),
    "tab:main_quality_efficiency": printed(
        "Quality and efficiency of PARK and the baselines, 720p, 50 steps, one A800",
        """
        Model | Method | PSNR | SSIM | LPIPS | SubCons. | BackCons. | ImageQual. | AesQual. | Latency | Speedup
        Wan2.2-14B | Dense | -- | -- | -- | 97.13% | 97.22% | 73.78% | 65.56% | 3792s | 1.00×
        Wan2.2-14B | SpargeAttn | 18.32 | 0.714 | 0.295 | 97.10% | 97.33% | 73.73% | 65.55% | 2614s | 1.45×
        Wan2.2-14B | XAttention | 17.31 | 0.640 | 0.353 | 96.89% | 97.10% | 73.87% | 66.07% | 2819s | 1.34×
        Wan2.2-14B | SVG | 17.33 | 0.663 | 0.342 | 96.99% | 96.96% | 73.73% | 65.85% | 2668s | 1.42×
        Wan2.2-14B | SVG2 | 18.77 | 0.730 | 0.288 | 96.88% | 97.11% | 73.71% | 65.20% | 2672s | 1.42×
        Wan2.2-14B | SVOO | 19.08 | 0.753 | 0.267 | 97.15% | 97.34% | 73.76% | 65.31% | 2722s | 1.39×
        Wan2.2-14B | PARK | 19.19 | 0.754 | 0.265 | 97.11% | 97.23% | 73.73% | 65.29% | 2452s | 1.55×
        Wan2.1-1.3B | Dense | -- | -- | -- | 97.36% | 96.99% | 70.59% | 61.23% | 745s | 1.00×
        Wan2.1-1.3B | SpargeAttn | 25.15 | 0.857 | 0.231 | 97.28% | 96.95% | 71.44% | 61.58% | 478s | 1.57×
        Wan2.1-1.3B | XAttention | 23.43 | 0.786 | 0.296 | 96.68% | 96.36% | 68.71% | 60.82% | 495s | 1.51×
        Wan2.1-1.3B | SVG | 22.39 | 0.754 | 0.336 | 96.73% | 96.47% | 72.16% | 60.99% | 506s | 1.47×
        Wan2.1-1.3B | SVG2 | 25.98 | 0.867 | 0.230 | 96.45% | 96.03% | 67.78% | 58.90% | 435s | 1.71×
        Wan2.1-1.3B | SVOO | 27.36 | 0.901 | 0.187 | 97.32% | 97.07% | 70.94% | 61.25% | 472s | 1.58×
        Wan2.1-1.3B | PARK | 27.52 | 0.908 | 0.177 | 97.22% | 96.87% | 70.48% | 61.02% | 423s | 1.76×
        Wan2.1-14B | Dense | -- | -- | -- | 97.95% | 97.83% | 72.46% | 61.83% | 3595s | 1.00×
        Wan2.1-14B | SpargeAttn | 20.55 | 0.757 | 0.295 | 94.88% | 95.49% | 72.80% | 61.73% | 2732s | 1.32×
        Wan2.1-14B | XAttention | 21.67 | 0.794 | 0.266 | 97.82% | 97.73% | 71.94% | 62.13% | 2710s | 1.33×
        Wan2.1-14B | SVG | 20.87 | 0.785 | 0.277 | 97.74% | 97.90% | 71.99% | 63.18% | 2747s | 1.31×
        Wan2.1-14B | SVG2 | 22.98 | 0.848 | 0.219 | 97.82% | 97.51% | 72.24% | 61.61% | 2490s | 1.44×
        Wan2.1-14B | SVOO | 23.66 | 0.871 | 0.188 | 97.89% | 97.76% | 72.42% | 61.63% | 2754s | 1.31×
        Wan2.1-14B | PARK | 24.01 | 0.875 | 0.186 | 97.91% | 97.74% | 72.28% | 62.03% | 2354s | 1.53×
        HunyuanVideo | Dense | -- | -- | -- | 96.95% | 96.98% | 69.69% | 55.58% | 3058s | 1.00×
        HunyuanVideo | SpargeAttn | 29.32 | 0.923 | 0.187 | 96.83% | 96.44% | 69.90% | 55.44% | 2064s | 1.48×
        HunyuanVideo | XAttention | 29.08 | 0.909 | 0.198 | 96.80% | 96.28% | 69.44% | 55.27% | 2243s | 1.36×
        HunyuanVideo | SVG | 27.88 | 0.898 | 0.221 | 96.71% | 96.38% | 68.96% | 55.32% | 2066s | 1.48×
        HunyuanVideo | SVG2 | 29.27 | 0.914 | 0.213 | 96.60% | 96.05% | 66.50% | 54.05% | 1978s | 1.55×
        HunyuanVideo | SVOO | 30.31 | 0.931 | 0.172 | 96.88% | 96.39% | 69.19% | 55.05% | 1975s | 1.55×
        HunyuanVideo | PARK | 30.69 | 0.936 | 0.166 | 96.87% | 96.50% | 69.41% | 55.07% | 1837s | 1.66×""",
    ),
    "tab:module_ablation": printed(
        "PARK without PAMA and without QRKC",
        """
        Model | Variant | PSNR | SSIM | LPIPS | Latency
        HunyuanVideo | PARK | 29.85 | 0.931 | 0.168 | 1827s
        HunyuanVideo | w/o PAMA | 28.40 | 0.911 | 0.205 | 1824s
        HunyuanVideo | w/o QRKC | 29.54 | 0.928 | 0.173 | 1826s
        Wan2.1-14B | PARK | 23.90 | 0.871 | 0.189 | 2359s
        Wan2.1-14B | w/o PAMA | 23.48 | 0.864 | 0.199 | 2353s
        Wan2.1-14B | w/o QRKC | 23.80 | 0.869 | 0.190 | 2354s""",
    ),
    "tab:query_representation_errors": printed(
        "Mean total variation of attention weights, Euclidean partitions",
        """
        Query | Key | Wan2.1-14B | HunyuanVideo
        Full | Full | 0.0000 | 0.0000
        Centroid | Centroid | 0.1774 | 0.2092
        Centroid | Full | 0.1335 | 0.1667
        Full | Centroid | 0.0927 | 0.1066""",
    ),
    "tab:key_score_errors": printed(
        "Errors of keys and of QK scores when keys are replaced by centroids",
        """
        Model | Metric | Euclidean | QRKC | Change
        Wan2.1-14B | Raw-key MSE | 66.88 | 72.59 | +8.5%
        Wan2.1-14B | QK-score squared error | 11.49 | 7.28 | -36.6%
        HunyuanVideo | Raw-key MSE | 79.51 | 91.31 | +14.8%
        HunyuanVideo | QK-score squared error | 2.92 | 2.26 | -22.8%""",
    ),
    "tab:pama_kernel_overhead": printed(
        "PAMA: runtime and additional GPU memory",
        """
        Model | Implementation | Latency | Speedup | Peak memory | Reduction | Saving
        HunyuanVideo | PyTorch | 87.95ms | 1.00× | 21.09 GB | 1.00× | 0.00%
        HunyuanVideo | Triton (Two-pass) | 28.12ms | 3.13× | 24.12 MB | 895.60× | 99.89%
        HunyuanVideo | Triton (Full-K) | 15.82ms | 5.56× | 24.17 MB | 893.86× | 99.89%
        HunyuanVideo | TileLang (Two-pass) | 21.35ms | 4.12× | 24.12 MB | 895.60× | 99.89%
        HunyuanVideo | TileLang (Full-K) | 21.08ms | 4.17× | 24.17 MB | 893.86× | 99.89%
        Wan2.1-14B | PyTorch | 92.81ms | 1.00× | 23.07 GB | 1.00× | 0.00%
        Wan2.1-14B | Triton (Two-pass) | 31.35ms | 2.96× | 40.20 MB | 587.71× | 99.83%
        Wan2.1-14B | Triton (Full-K) | 17.72ms | 5.24× | 40.27 MB | 586.57× | 99.83%
        Wan2.1-14B | TileLang (Two-pass) | 23.82ms | 3.90× | 40.20 MB | 587.71× | 99.83%
        Wan2.1-14B | TileLang (Full-K) | 23.22ms | 4.00× | 40.27 MB | 586.57× | 99.83%""",
    ),
    "tab:centroid_count_sensitivity_hy": printed(
        "Numbers of query and key blocks on HunyuanVideo",
        """
        N_Q | N_K | PSNR | SSIM | LPIPS | Latency | Speedup
        64 | 1,024 | 29.38 | 0.926 | 0.175 | 1817s | 1.68×
        128 | 1,024 | 29.85 | 0.931 | 0.168 | 1827s | 1.67×
        192 | 1,024 | 29.94 | 0.933 | 0.167 | 1841s | 1.66×
        256 | 1,024 | 30.13 | 0.934 | 0.164 | 1855s | 1.64×
        320 | 1,024 | 30.13 | 0.935 | 0.162 | 1875s | 1.63×
        128 | 512 | 29.56 | 0.928 | 0.174 | 1830s | 1.67×
        128 | 768 | 29.74 | 0.931 | 0.170 | 1834s | 1.66×""",
    ),
    "tab:centroid_count_sensitivity_wan": printed(
        "Numbers of query and key blocks on Wan2.1-1.3B",
        """
        N_Q | N_K | PSNR | SSIM | LPIPS | Latency | Speedup
        64 | 512 | 27.30 | 0.903 | 0.183 | 410s | 1.82×
        128 | 512 | 27.52 | 0.908 | 0.177 | 423s | 1.76×
        192 | 512 | 27.66 | 0.911 | 0.174 | 427s | 1.74×
        256 | 512 | 27.71 | 0.911 | 0.173 | 430s | 1.73×
        320 | 512 | 27.79 | 0.913 | 0.172 | 440s | 1.69×
        128 | 768 | 27.67 | 0.910 | 0.175 | 416s | 1.79×
        128 | 1024 | 27.72 | 0.912 | 0.173 | 420s | 1.77×""",
    ),
    "tab:reuse_schedule_hy": printed(
        "Steps at which plans are rebuilt, HunyuanVideo, 50 steps",
        """
        Refreshes at | PSNR | SSIM | LPIPS | Latency | Speedup
        {10} | 29.55 | 0.928 | 0.174 | 1829s | 1.67×
        {10,30} | 29.67 | 0.930 | 0.171 | 1819s | 1.68×
        {10,20,30} | 29.84 | 0.932 | 0.168 | 1819s | 1.68×
        {10,20,30,40} | 29.85 | 0.931 | 0.168 | 1827s | 1.67×""",
    ),
    # figures whose numbers stand in the text
    "fig:mismatch_errors_appendix": printed(
        "Left: mean total variation of attention weights. Right: mean centred log-mass RMSE",
        """
        Metric | Estimate | Wan2.1-14B | HunyuanVideo
        attention-weight TV | query centroid | 0.1774 | 0.2092
        attention-weight TV | per query | 0.0927 | 0.1066
        log-mass RMSE | Euclidean | 0.4960 | 0.4949
        log-mass RMSE | QRKC | 0.4109 | 0.4113""",
    ),
    "fig:qrkc_breakdown": printed(
        "Overhead of QRKC without k-means; its parts are drawn and not printed",
        """
        Part | Time
        together | below 2 ms""",
    ),
}
