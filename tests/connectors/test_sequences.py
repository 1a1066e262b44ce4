"""The front door for sequence files: the shared cases, made files of every format, and faults."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.sequences import (
    CODES,
    Genome,
    SequenceError,
    _others,
    features,
    intervals,
    parse_region,
    pieces,
    read,
    reverse_complement,
    variants,
)

CASES = Path(__file__).parents[2] / "../shared/cases/sequences"
READS = "@r1 lane1\nACGT\n+\nIIII\n@r2\nGGNAC\n+r2\n@@+II\n"


@pytest.fixture
def case():
    def find(name):
        path = CASES / name
        if not path.exists():
            if os.environ.get("TETHYS_REQUIRE_DATA") == "1":
                pytest.fail(f"shared case {name} is required and absent")
            pytest.skip(f"shared case {name} is absent")
        return path

    return find


def rows(reader):
    return [(record.id, record.sequence, record.qualities) for record in reader]


def write(tmp_path, text, name="file"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# The shared cases ---------------------------------------------------------------------------------------------------


def test_case_01_truncated_quality_stops_with_place_and_last_good(case):
    reader = iter(read(case("01_truncated.fastq")))
    assert next(reader).sequence == "ACGTACGTAC"
    with pytest.raises(SequenceError) as caught:
        next(reader)
    assert (caught.value.record, caught.value.id, caught.value.line, caught.value.last_good) == (2, "r2", 8, "r1")
    assert "quality has 5 characters, sequence has 10" in str(caught.value)
    assert "01_truncated.fastq" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_case_01_skip_keeps_r1_and_writes_the_dead_letter(case, tmp_path):
    dead = tmp_path / "dead.jsonl"
    reader = read(case("01_truncated.fastq"), on_bad_record="skip", dead_letter=dead)
    assert [record.id for record in reader] == ["r1"]
    assert reader.report.bad_records == 1
    entry = json.loads(dead.read_text())
    assert (entry["record"], entry["id"], entry["line"]) == (2, "r2", 8)
    assert entry["text"].startswith("@r2\nGGGTTTAAAC")


def test_case_02_fasta_named_fastq_is_read_with_a_warning_or_refused_when_fastq_is_demanded(case):
    reader = read(case("02_fasta_named.fastq"))
    assert rows(reader) == [("a", "ACGT", None), ("b", "GGCC", None)]
    assert reader.report.warnings == ["looks like FASTA although its name promises FASTQ; read as fasta"]
    with pytest.raises(SequenceError, match="looks like FASTA, expected FASTQ"):
        read(case("02_fasta_named.fastq"), format="fastq")


def test_case_04_iupac_codes_are_complemented_and_counted(case):
    reader = read(case("04_iupac.fa"))
    (record,) = reader
    assert reverse_complement(record.sequence.encode()) == b"NBDHVKMWSRYACGT"
    assert reverse_complement(reverse_complement(record.sequence.encode())) == record.sequence.encode()
    assert reader.report.ambiguous == dict.fromkeys("RYSWKMBDHVN", 1)


def test_case_05_bed_over_a_genome(case):
    genome = Genome(case("05_ref.fa"))
    reader = read(case("05_regions.bed"), genome=genome, on_bad_record="skip")
    found = {record.id: record.sequence for record in reader}
    assert found == {"first": "AAAA", "last": "TCGT", "mid": "CCCC", "other": "TTTT"}
    assert reader.report.bad_records == 2  # over and empty
    assert set(reader.report.warnings) == {'strand "." is read as "+"', "'chr2' is read as '2'"}
    with pytest.raises(SequenceError, match=r"`over`.*line 7.*chr1:18-25 runs past the contig"):
        list(read(case("05_regions.bed"), genome=genome))
    padded = read(case("05_regions.bed"), genome=genome, pad=True, on_bad_record="skip")
    assert {record.id: record.sequence for record in padded}["over"] == "GANNNNN"
    assert (genome.region("chr1:1-4"), genome.region("chr1:17-20")) == (b"AAAA", b"ACGA")


def test_case_08_labels_are_names(case):
    labels = [record.label for record in read(case("08_labels.tsv"))]
    assert labels == ["promoter", "enhancer", "ocr", "enhancer", "promoter", "ocr"]


def test_case_12_wrapped_reads_and_qualities_that_start_like_headers(case):
    reader = read(case("12_tricky.fastq"))
    assert rows(reader) == [("q1", "ACGT", "@III"), ("q2", "ACGTACGTAC", "IIIIII@III"), ("q3", "", "")]
    assert (reader.report.records, reader.report.empty) == (3, 1)


def test_case_13_joined_features_come_in_biological_order(case):
    (record,) = read(case("13_join.gb"))
    assert record.sequence == "ATGAAACCCGGGTTTTAGACGTACGTTTAACATGCCC"
    found = {feature.name: feature for feature in features(case("13_join.gb"), kinds=["CDS"])}
    assert found["m"].bases == b"AAACCCTTTCAT"
    assert found["p"].bases == b"ATGAAATTTTAG"
    assert found["fuzzy"].partial and not found["m"].partial
    assert (found["fuzzy"].parts[0][0], found["fuzzy"].parts[1][1]) == (0, 37)


# Bytes --------------------------------------------------------------------------------------------------------------


def bgzip(data):
    """Two gzip members and the empty one that ends a bgzip file."""
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:]) + gzip.compress(b"")


@pytest.mark.parametrize("pack", [gzip.compress, bgzip, bz2.compress, lzma.compress], ids=["gz", "bgz", "bz2", "xz"])
def test_compression_is_found_by_content(tmp_path, pack):
    path = write(tmp_path, pack(READS.encode()), "plainly_named.fastq")
    assert rows(read(path)) == [("r1", "ACGT", "IIII"), ("r2", "GGNAC", "@@+II")]


def test_half_a_gzip_file_is_an_error_that_names_the_last_good_read(tmp_path):
    choose = random.Random(1)
    reads = "".join(f"@r{i}\n{''.join(choose.choices('ACGT', k=50))}\n+\n{'I' * 50}\n" for i in range(20_000))
    whole = gzip.compress(reads.encode())
    path = write(tmp_path, whole[: len(whole) // 2], "reads.fq.gz")
    reader, seen = iter(read(path)), 0
    with pytest.raises(SequenceError, match=r"break off or are damaged.*last good record: `r\d+`"):
        for _ in reader:
            seen += 1
    assert seen > 1000


def test_double_compression_and_foreign_formats_are_named(tmp_path):
    with pytest.raises(SequenceError, match="compressed twice"):
        read(write(tmp_path, gzip.compress(gzip.compress(b">a\nA\n"))))
    with pytest.raises(SequenceError, match="is BAM"):
        read(write(tmp_path, gzip.compress(b"BAM\x01....")))
    with pytest.raises(SequenceError, match="is SAM"):
        read(write(tmp_path, "@HD\tVN:1.6\n"))
    with pytest.raises(SequenceError, match="starts with 'ACGT'"):
        read(write(tmp_path, "ACGT\n", "a.fa"))
    with pytest.raises(SequenceError, match="cannot be opened"):
        read(tmp_path / "absent.fa")


def test_an_empty_file_is_no_record_and_a_warning(tmp_path):
    for name in ("a.fa", "a.fastq", "a.gb"):
        reader = read(write(tmp_path, "", name))
        assert list(reader) == []
        assert reader.report.warnings == ["holds no record"]


def test_standard_input_and_open_files():
    code = "from connectors.sequences import read\nfor r in read('-'): print(r.id, r.sequence)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], input=gzip.compress(READS.encode()), capture_output=True, env=environment)
    assert done.stdout.decode().split("\n")[:2] == ["r1 ACGT", "r2 GGNAC"]
    assert rows(read(io.BytesIO(b">a\nAC\nGT\n"))) == [("a", "ACGT", None)]


# FASTA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 17])
def test_fasta_is_the_same_for_any_block_size(tmp_path, monkeypatch, block):
    text = ">a x\r\nAC\r\nGT\r\n\r\n>b\n\n>c > not a record\nacgtn\n>d\nA\n>e\nC\n>f\nGG\n>φ1|x/2\nTT"
    path = write(tmp_path, text)
    monkeypatch.setattr("connectors.sequences.Bytes.read.__defaults__", (block,))
    reader = read(path)
    assert [(record.name, record.sequence) for record in reader] == [
        ("a x", "ACGT"),
        ("b", ""),
        ("c > not a record", "ACGTN"),
        ("d", "A"),
        ("e", "C"),
        ("f", "GG"),
        ("φ1|x/2", "TT"),
    ]
    assert (reader.report.records, reader.report.bases, reader.report.empty) == (7, 15, 1)
    assert reader.report.ambiguous == {"N": 1}
    assert [(id, start, bases) for id, start, bases in pieces(path, 3)] == [
        ("a", 0, b"ACG"),
        ("a", 3, b"T"),
        ("c", 0, b"ACG"),
        ("c", 3, b"TN"),
        ("d", 0, b"A"),
        ("e", 0, b"C"),
        ("f", 0, b"GG"),
        ("φ1|x/2", 0, b"TT"),
    ]


def test_case_is_kept_only_on_request(tmp_path):
    path = write(tmp_path, ">a\nacGT\n>b\nttnn\n")
    assert [record.sequence for record in read(path)] == ["ACGT", "TTNN"]
    assert [record.sequence for record in read(path, keep_case=True)] == ["acGT", "ttnn"]


@pytest.mark.parametrize("block", [3, 1 << 17])
def test_a_bad_letter_is_named_by_record_and_line(tmp_path, monkeypatch, block):
    monkeypatch.setattr("connectors.sequences.Bytes.read.__defaults__", (block,))
    path = write(tmp_path, ">a\nACGT\n>b two\nACGT\nAC!T\n>c\nAA\n>d\nE\n>e\nTT\n")
    with pytest.raises(SequenceError) as caught:
        list(read(path))
    assert (caught.value.record, caught.value.id, caught.value.line, caught.value.last_good) == (2, "b", 5, "a")
    reader = read(path, on_bad_record="skip")
    assert [record.id for record in reader] == ["a", "c", "e"]
    assert reader.report.bad_records == 2


def test_text_before_the_first_header_is_an_error_and_a_byte_order_mark_is_not(tmp_path):
    with pytest.raises(SequenceError, match="line 2: is no sequence file this door knows: it starts with '; a comment'"):
        read(write(tmp_path, "\n; a comment\n>a\nA\n", "a.fa"))
    assert rows(read(write(tmp_path, "\ufeff>a\nAC\n"))) == [("a", "AC", None)]


# FASTQ --------------------------------------------------------------------------------------------------------------


def made_reads(seed=3, count=300):
    choose = random.Random(seed)
    text, expected = [], []
    for i in range(count):
        length = choose.randrange(0, 40)
        bases = "".join(choose.choices("ACGTN", k=length))
        quality = "".join(choose.choices("@+I!~", k=length))
        name = f"read{i} ch={i % 7}"
        expected.append((f"read{i}", bases, quality))
        cut = choose.randrange(1, length) if length > 2 and choose.random() < 0.2 else 0
        if cut and not quality[cut:].startswith("@"):  # wrapped, in a way that is no riddle
            bases, quality = f"{bases[:cut]}\n{bases[cut:]}", f"{quality[:cut]}\n{quality[cut:]}"
        mark = f"+{name}" if choose.random() < 0.3 else "+"
        text.append(f"@{name}\n{bases}\n{mark}\n{quality}\n" + ("\n" if choose.random() < 0.05 and length else ""))
    return "".join(text), expected


@pytest.mark.parametrize("block", [1, 13, 500, 1 << 17])
@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_fastq_is_the_same_for_any_block_size_and_layout(tmp_path, monkeypatch, block, ending):
    text, expected = made_reads()
    monkeypatch.setattr("connectors.sequences.Bytes.read.__defaults__", (block,))
    assert rows(read(write(tmp_path, text.replace("\n", ending)))) == expected


def test_fastq_equals_biopython(tmp_path):
    from Bio.SeqIO.QualityIO import FastqGeneralIterator

    text, expected = made_reads(seed=8)
    text = "".join(f"@{name}\n{bases}\n+\n{quality}\n" for name, bases, quality in expected if bases)
    path = write(tmp_path, text)
    with open(path) as handle:
        assert rows(read(path)) == [tuple(entry) for entry in FastqGeneralIterator(handle)]


FAULTS = {
    "short quality": ("@bad\nACGT\n+\nIII\n", "quality has 3 characters, sequence has 4", 12),
    "long quality": ("@bad\nACGT\n+\nIIIII\n", "quality has 5 characters, sequence has 4", 12),
    "no plus": ("@bad\nACGT\n", r"a new record starts before the '\+'", 11),
    "other name": ("@bad\nACGT\n+worse\nIIII\n", "names `worse`", 11),
    "letter": ("@bad\nAC*T\n+\nIIII\n", r"'\*': no nucleotide code", 10),
    "control": ("@bad\nACGT\n+\nII\x07I\n", "outside '!' to '~'", 12),
    "no mark": ("bad\nACGT\n+\nIIII\n", "expected '@', found 'b'", 9),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("block", [4, 1 << 17])
def test_fastq_faults_stop_by_name_and_are_skipped_on_request(tmp_path, monkeypatch, fault, block):
    monkeypatch.setattr("connectors.sequences.Bytes.read.__defaults__", (block,))
    bad, reason, line = FAULTS[fault]
    good = "@a\nACGT\n+\nIIII\n@b\nAC\n+\n@I\n"
    path = write(tmp_path, good + bad + good.replace("@a", "@c").replace("@b\n", "@d\n"))
    with pytest.raises(SequenceError, match=reason) as caught:
        list(read(path))
    assert (caught.value.record, caught.value.last_good, caught.value.line) == (3, "b", line)
    reader = read(path, on_bad_record="skip")
    assert [record.id for record in reader] == ["a", "b", "c", "d"]
    assert reader.report.bad_records >= 1


# GenBank, EMBL, tables ----------------------------------------------------------------------------------------------


def test_embl_is_read_and_damage_is_named(tmp_path):
    text = (
        "ID   X1; SV 1; linear; DNA; STD; SYN; 12 BP.\nXX\nAC   X1;\nXX\nFH   Key             Location/Qualifiers\n"
        'FT   CDS             complement(2..7)\nFT                   /gene="g"\nXX\n'
        "SQ   Sequence 12 BP; 3 A; 3 C; 3 G; 3 T; 0 other;\n     acgtacgtac gt                     12\n//\n"
    )
    path = write(tmp_path, text, "x.embl")
    assert [record.sequence for record in read(path)] == ["ACGTACGTACGT"]
    (feature,) = features(path)
    assert (feature.bases, feature.parts, feature.strand) == (reverse_complement(b"CGTACG"), ((1, 7),), -1)
    with pytest.raises(SequenceError, match="no features"):
        list(features(write(tmp_path, ">a\nA\n", "x.fa")))


def test_tables_with_and_without_header(tmp_path):
    path = write(tmp_path, "EI,  one,   ACGN\nIE, two,GG\n")
    found = [(r.label, r.id, r.sequence) for r in read(path, columns=("label", "id", "sequence"))]
    assert found == [("EI", "one", "ACGN"), ("IE", "two", "GG")]
    path = write(tmp_path, "sequence\tlabel\r\nACGT\t1\r\nAXGT\t0\r\nAC\r\n\tz\r\nGG\t0\r\n", "t.tsv")
    reader = read(path, on_bad_record="skip")
    assert [(r.sequence, r.label) for r in reader] == [("ACGT", "1"), ("GG", "0")]
    assert reader.report.bad_records == 3
    with pytest.raises(SequenceError, match=r"record 2 .*line 3: 'X'"):
        list(read(path))
    with pytest.raises(SequenceError, match="no column is named sequence or seq"):
        list(read(write(tmp_path, "a,b\nAC,1\n", "t.csv")))


# Genomes, intervals, variants ---------------------------------------------------------------------------------------


def made_genome(tmp_path, width=7, pack=None, name="genome.fa"):
    choose = random.Random(5)
    contigs = {name: "".join(choose.choices("ACGTacgtN", k=length)) for name, length in (("chr1", 100), ("2", 33))}
    lines = [
        line for name, bases in contigs.items() for line in (f">{name} made", *(bases[i : i + width] for i in range(0, len(bases), width)))
    ]
    data = ("\n".join(lines) + "\n").encode()
    return write(tmp_path, pack(data) if pack else data, name), {k: v.upper() for k, v in contigs.items()}


@pytest.mark.parametrize("pack", [None, gzip.compress], ids=["plain", "gz"])
def test_genome_windows_equal_slices_and_an_independent_reader(tmp_path, pack):
    path, contigs = made_genome(tmp_path, pack=pack)
    genome = Genome(path)
    for start, end in itertools.combinations(range(0, 34, 3), 2):
        for contig, bases in contigs.items():
            expected = bases[start:end].encode()
            assert genome.fetch(contig, start, end) == expected
            assert genome.fetch(contig, start, end, "-") == reverse_complement(expected)
            assert genome.region(f"{contig}:{start + 1}-{end}") == expected
    if pack is None:
        pysam = pytest.importorskip("pysam")
        with pysam.FastaFile(str(path)) as other:
            assert other.fetch("chr1", 13, 58).upper().encode() == genome.fetch("chr1", 13, 58)


def test_genome_refuses_what_it_does_not_hold(tmp_path):
    genome = Genome(made_genome(tmp_path)[0])
    with pytest.raises(ValueError, match="chr1:95-101 runs past the contig"):
        genome.fetch("chr1", 95, 101)
    with pytest.raises(ValueError, match="holds no base"):
        genome.fetch("chr1", 5, 5)
    with pytest.raises(KeyError, match=r"chr3 not in .* \(has: chr1, 2\)"):
        genome.fetch("chr3", 0, 1)
    assert genome.fetch("chr1", -3, 2, pad=True)[:3] == b"NNN"
    assert genome.fetch("chr1", 98, 104, "-", pad=True)[:4] == b"NNNN"
    with pytest.raises(ValueError, match="1-based"):
        parse_region("chr1:0-4")


def test_uneven_lines_are_held_instead_of_indexed(tmp_path):
    path = write(tmp_path, ">a\nACG\nAC\nACGT\n>b\nTT\n")
    assert Genome(path).fetch("a", 2, 6) == b"GACA"


def test_intervals_of_bed_and_of_named_columns(tmp_path):
    bed = write(tmp_path, "track x\nchr1\t0\t4\tone\t0\t-\nchr1\t5\t9\n")
    assert [entry[:5] for entry in intervals(bed)] == [("chr1", 0, 4, "one", "-"), ("chr1", 5, 9, "chr1:5-9", ".")]
    table = write(tmp_path, "id,region,start,end,strand\n0,chrX,1,7,\n", "t.csv")
    assert [entry[:5] for entry in intervals(table)] == [("chrX", 1, 7, "0", ".")]
    with pytest.raises(SequenceError, match="line 1: no interval"):
        list(intervals(write(tmp_path, "chr1\tx\ty\n")))


def test_variants_keep_their_index_and_tell_their_status(tmp_path):
    path = write(tmp_path, ">1\nAACCGGTTAACCGGTT\n", "genome.fa")
    genome = Genome(path)
    vcf = write(
        tmp_path,
        "##fileformat=VCFv4.2\n#CHROM\tPOS\tID\tREF\tALT\n"
        "chr1\t5\ta\tG\tA,<DEL>\n1\t5\tb\tT\tA\n1\t3\tc\tCC\tC\n1\t3\td\tC\tCTT\n9\t3\te\tC\tT\n1\t99\tf\tC\tT\n1\t3\tg\tC\tN\n1\t3\th\tC\tCR\n",
    )
    found = {(variant.name, variant.alt): variant for variant in variants(vcf, genome, 8)}
    status = {name: variant.status for (name, _), variant in found.items() if name != "a"}
    assert status == {"b": "ref_mismatch", "c": "ok", "d": "ok", "e": "no_contig", "f": "out_of_contig", "g": "ambiguous", "h": "ambiguous"}
    assert found["a", "<DEL>"].status == "symbolic"
    assert found["b", "A"].found == "G"
    for variant in found.values():
        if variant.status == "ok":
            assert len(variant.reference) == len(variant.alternative) == 8
            ref = variant.reference[variant.offset : variant.offset + len(variant.ref)].decode()
            alt = variant.alternative[variant.offset : variant.offset + len(variant.alt)].decode()
            assert (ref, alt) == (variant.ref, variant.alt)
            assert variant.reference[: variant.offset] == variant.alternative[: variant.offset]
    assert found["a", "A"].reference == b"AACCGGTT"
    assert found["c", "C"].alternative == b"NNAACGGT"
    assert found["d", "CTT"].alternative == b"NNAACTTC"
    reader = read(vcf, genome=genome, window=8, on_bad_record="skip")
    assert [record.id for record in reader] == ["chr1:5:G>A", "1:3:CC>C", "1:3:C>CTT"]


def test_bad_lines_of_intervals_and_variants_are_skipped_on_request(tmp_path):
    genome = write(tmp_path, ">1\nAACCGGTTAACCGGTT\n", "genome.fa")
    bed = write(tmp_path, "1\t0\t4\ta\n1\tx\t9\tb\n1\t4\t8\tc\n", "x.bed")
    reader = read(bed, genome=genome, on_bad_record="skip")
    assert [(record.id, record.sequence) for record in reader] == [("a", "AACC"), ("c", "GGTT")]
    assert reader.report.bad_records == 1
    vcf = write(tmp_path, "##fileformat=VCFv4.2\n1\t3\ta\tC\tT\n1\tthree\tb\tC\tT\n1\t4\tc\tC\tT\n", "x.vcf")
    reader = read(vcf, genome=genome, window=4, on_bad_record="skip")
    assert [record.id for record in reader] == ["1:3:C>T", "1:4:C>T"]
    with pytest.raises(SequenceError, match="line 3: no variant"):
        list(variants(vcf, Genome(genome), 4))
    for line in ("1\t3\ta\t\tT", "1\t3\ta\tC\t", "1\t3\ta\tC"):  # no REF, no ALT, a field too few
        with pytest.raises(SequenceError, match="line 1: no variant"):
            list(variants(io.BytesIO(f"{line}\n".encode()), Genome(genome), 4))


def test_wrapped_reads_do_not_pile_up(tmp_path):
    """A long file of wrapped reads goes out block by block, as a file of four-line reads does."""
    text = "".join(f"@r{i}\n{'ACGTT' * 14}\n{'GATTA' * 14}\nAC\n+\n{'I' * 70}\n{'@' * 70}\nII\n" for i in range(4000))
    batches = list(read(write(tmp_path, text)).batches())
    assert sum(map(len, batches)) == 4000
    assert max(map(len, batches)) < 1000
    assert {record.sequence for batch in batches for record in batch} == {"ACGTT" * 14 + "GATTA" * 14 + "AC"}


def test_memory_stays_flat_over_a_long_file(tmp_path):
    choose = random.Random(2)
    chunk = "".join(f"@r{i}\n{''.join(choose.choices('ACGT', k=100))}\n+\n{'I' * 100}\n" for i in range(5000))
    path = tmp_path / "long.fq"
    with open(path, "w") as file:
        for _ in range(30):
            file.write(chunk)
    code = (
        "import resource, sys\nfrom connectors.sequences import read\n"
        "reader = iter(read(sys.argv[1]))\n"
        "for _ in range(5000): next(reader)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "n = sum(1 for _ in reader)\n"
        "print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment)
    reads, growth = map(int, done.stdout.split())
    assert reads == 145_000
    assert growth < 4096  # kB, over 31 MB of file


def test_letters_beside_acgt_are_found_one_by_one():
    for code in range(128):
        letters = b"ACGT" * 20 + bytes((code,)) * 3 + b"CANT"
        assert _others(letters) == letters.translate(None, b"ACGT"), chr(code)
    assert (_others(b""), _others(b"ACGT")) == (b"", b"")


def test_every_code_has_a_complement():
    codes = CODES.replace(b"U", b"")
    assert reverse_complement(reverse_complement(codes)) == codes
