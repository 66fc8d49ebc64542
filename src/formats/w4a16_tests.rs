use super::super::Fit;
use super::*;

fn all() -> Vec<W4a16> {
    let mut formats = Vec::new();
    for method in [Method::RoundToNearest, Method::Search] {
        for group_size in W4a16::GROUP_SIZES {
            for head in [Head::Int4, Head::Source, Head::Int8] {
                for layout in Layout::ALL {
                    if layout != Layout::RowMajor || head != Head::Int8 {
                        formats.push(W4a16::new(method, group_size, layout, head));
                    }
                }
            }
            formats.push(W4a16::with_quantized_embedding(method, group_size));
        }
    }
    formats
}

#[test]
fn options_come_back_and_names_tell_formats_apart() {
    let mut names = std::collections::HashSet::new();
    for format in all() {
        assert_eq!(W4a16::from_options(&format.options()), Ok(format));
        assert!(names.insert(format.name_suffix()), "{}", format.name_suffix());
    }
    assert!(W4a16::from_options(&Map::new()).is_err());
    let mut options = W4a16::new(Method::Search, 128, Layout::RowMajor, Head::Int4).options();
    options.insert("head".to_owned(), "int8".into());
    assert!(W4a16::from_options(&options).is_err());
}

#[test]
fn the_block_is_the_specified_one_and_names_its_layout() {
    let format = W4a16::new(Method::Search, 128, Layout::TinygemmAvx512, Head::Int4);
    let mut config = Map::new();
    format.patch_config(&mut config, &["model.layers.0.mlp.up_proj".to_owned()]);
    assert_eq!(config["tie_word_embeddings"], false);
    let expected: Value = serde_json::from_str(
        r#"{
  "quant_method": "cpu_int4", "version": 1, "bits": 4, "group_size": 128, "sym": false,
  "layout": "tinygemm-avx512-n64", "scale_dtype": "bfloat16",
  "lm_head": true, "quantize_embedding": false,
  "direct_dequant": true, "prefill_dequant": true, "dequant_threshold": 2,
  "ignore": ["re:.*g_proj$", "model.embedding", "model.layers.0.mlp.up_proj"]
}"#,
    )
    .unwrap();
    assert_eq!(config["quantization_config"], expected);
    let block = |head| W4a16::new(Method::Search, 64, Layout::TinygemmAvx2, head).quantization_config(&[]);
    assert_eq!(block(Head::Int8)["lm_head_bits"], 8);
    assert_eq!(block(Head::Int8)["layout"], "tinygemm-avx2-n32");
    assert_eq!(block(Head::Source)["lm_head"], false);
}

/// The older reader's rules: no `re:`, its own name of the table, and what it takes for an untied head.
#[test]
fn the_row_major_block_speaks_its_readers_language() {
    let block = |format: W4a16| {
        let mut config = Map::new();
        config.insert("tie_word_embeddings".to_owned(), true.into());
        format.patch_config(&mut config, &[]);
        config
    };
    let own = block(W4a16::new(Method::Search, 64, Layout::RowMajor, Head::Int4));
    assert_eq!(own["tie_word_embeddings"], false);
    assert_eq!(own["quantization_config"]["quantize_embedding"], true);
    assert_eq!(own["quantization_config"]["ignore"], json!(["g_proj", "model.embed_tokens"]));
    let tied = block(W4a16::with_quantized_embedding(Method::Search, 64));
    assert_eq!(tied["tie_word_embeddings"], true);
    assert_eq!(tied["quantization_config"]["quantize_embedding"], true);
    assert_eq!(tied["quantization_config"]["ignore"], json!(["g_proj"]));
    let plain = block(W4a16::new(Method::Search, 64, Layout::RowMajor, Head::Source));
    assert_eq!(plain["tie_word_embeddings"], true);
    assert_eq!(plain["quantization_config"]["quantize_embedding"], false);
}

#[test]
fn what_does_not_tile_is_kept_and_what_groups_do_not_divide_is_refused() {
    let codec = |layout| W4a16::new(Method::Search, 64, layout, Head::Int4).codec;
    assert_eq!(codec(Layout::TinygemmAvx512).fits([128, 64]), Fit::Fits);
    for rows in [16, 96, 80] {
        assert!(matches!(codec(Layout::TinygemmAvx512).fits([rows, 64]), Fit::Keep(_)), "{rows}");
    }
    assert_eq!(codec(Layout::TinygemmAvx2).fits([96, 64]), Fit::Fits);
    assert!(matches!(codec(Layout::TinygemmAvx2).fits([80, 64]), Fit::Keep(_)));
    assert_eq!(codec(Layout::RowMajor).fits([80, 64]), Fit::Fits);
    assert!(matches!(codec(Layout::RowMajor).fits([64, 96]), Fit::Refuse(_)));
}
