package interop;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import it.unimi.dsi.fastutil.longs.LongArrayList;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.NavigableMap;
import java.util.Set;
import java.util.TreeMap;
import org.apache.hadoop.conf.Configuration;
import org.apache.tephra.ChangeId;
import org.apache.tephra.TransactionManager.InProgressTx;
import org.apache.tephra.TransactionManager.InProgressType;
import org.apache.tephra.persist.TransactionSnapshot;
import org.apache.tephra.snapshot.SnapshotCodecProvider;

/** Transaction snapshots with Tephra's codecs: reads of any version, and writes of the newest version (V4). */
final class Snapshots {
  private static final SnapshotCodecProvider CODEC = new SnapshotCodecProvider(new Configuration(false));

  private Snapshots() {
  }

  static TransactionSnapshot read(Path file) throws IOException {
    try (InputStream bytes = Files.newInputStream(file)) {
      return CODEC.decode(bytes);
    }
  }

  static void write(Path file, TransactionSnapshot snapshot) throws IOException {
    try (OutputStream bytes = Files.newOutputStream(file)) {
      CODEC.encode(bytes, snapshot);
    }
  }

  /** Runs {@code snapshot FILE}: prints the decoded snapshot as one line. */
  static void print(Arguments args, Output out) throws IOException {
    out.line(describe(read(Path.of(args.word(0)))));
  }

  /** Returns a snapshot with the field names of the vectors. */
  static Map<String, Object> describe(TransactionSnapshot snapshot) {
    List<Object> inProgress = new ArrayList<>();
    snapshot.getInProgress().forEach((pointer, tx) -> inProgress.add(Output.map(
        "writePointer", pointer, "visibilityUpperBound", tx.getVisibilityUpperBound(),
        "expiration", tx.getExpiration(), "type", tx.getType(),
        "checkpointWritePointers", tx.getCheckpointWritePointers())));
    return Output.map("timestamp", snapshot.getTimestamp(), "readPointer", snapshot.getReadPointer(),
        "writePointer", snapshot.getWritePointer(), "invalid", snapshot.getInvalid(), "inProgress", inProgress,
        "committing", hexKeys(snapshot.getCommittingChangeSets()),
        "committed", hexKeys(snapshot.getCommittedChangeSets()));
  }

  /** Runs {@code write-snapshot FILE}: encodes a line of {@code snapshot} from standard input. */
  static void write(Arguments args, Output out) throws IOException {
    JsonObject json = new JsonParser()
        .parse(new InputStreamReader(System.in, StandardCharsets.UTF_8)).getAsJsonObject();
    NavigableMap<Long, InProgressTx> inProgress = new TreeMap<>();
    for (JsonElement element : json.getAsJsonArray("inProgress")) {
      JsonObject tx = element.getAsJsonObject();
      inProgress.put(tx.get("writePointer").getAsLong(), new InProgressTx(
          tx.get("visibilityUpperBound").getAsLong(), tx.get("expiration").getAsLong(),
          InProgressType.valueOf(tx.get("type").getAsString()),
          new LongArrayList(longs(tx.get("checkpointWritePointers")))));
    }
    write(Path.of(args.word(0)), new TransactionSnapshot(
        json.get("timestamp").getAsLong(), json.get("readPointer").getAsLong(),
        json.get("writePointer").getAsLong(), longs(json.get("invalid")), inProgress,
        changeIds(json.getAsJsonObject("committing")), changeIds(json.getAsJsonObject("committed"))));
    out.line("version", CODEC.getVersion());
  }

  private static List<Long> longs(JsonElement array) {
    List<Long> longs = new ArrayList<>();
    array.getAsJsonArray().forEach(number -> longs.add(number.getAsLong()));
    return longs;
  }

  private static Map<String, List<String>> hexKeys(Map<Long, Set<ChangeId>> changes) {
    Map<String, List<String>> hex = new TreeMap<>();
    changes.forEach((pointer, keys) -> hex.put(
        pointer.toString(), keys.stream().map(key -> Output.hex(key.getKey())).sorted().toList()));
    return hex;
  }

  private static Map<Long, Set<ChangeId>> changeIds(JsonObject hex) {
    Map<Long, Set<ChangeId>> changes = new HashMap<>();
    for (Map.Entry<String, JsonElement> entry : hex.entrySet()) {
      Set<ChangeId> keys = new HashSet<>();
      entry.getValue().getAsJsonArray()
          .forEach(key -> keys.add(new ChangeId(HexFormat.of().parseHex(key.getAsString()))));
      changes.put(Long.valueOf(entry.getKey()), keys);
    }
    return changes;
  }
}
